#pragma once

#include <cstddef>
#include <cstdint>

namespace brim::detail {

/// The place in a vector of what a trace numbers.
constexpr std::size_t index_of(std::int32_t number) noexcept {
  return static_cast<std::size_t>(number);
}

}  // namespace brim::detail
