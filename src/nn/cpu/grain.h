#pragma once

#include <algorithm>
#include <cstdint>

namespace brim::nn {

/// Elements; as much as ATen gives a thread at least.
inline constexpr std::int64_t kGrain = 32768;

/// The same in rows of so many elements.
[[nodiscard]] constexpr std::int64_t grain_of(std::int64_t row) {
  return std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, row));
}

}  // namespace brim::nn
