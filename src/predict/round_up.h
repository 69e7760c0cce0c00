#pragma once

#include <cstdint>

namespace brim {

/// Of numbers that are not negative.
constexpr std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace brim
