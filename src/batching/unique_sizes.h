#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>
#include <vector>

#include "batching/descending_sort.h"
#include "check_argument.h"

// Shared by the ways to make buckets: checks of sizes, and the distinct ones among them.

namespace brim::batching::detail {

using brim::detail::check_argument;

inline constexpr const char* kNotAllowed = " is not allowed; it must be ";

inline void check_finite(std::span<const std::int64_t> /*sizes*/) {}

inline void check_finite(std::span<const double> sizes) {
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    check_argument(std::isfinite(sizes[i]), "sizes[", i, "]=", sizes[i], kNotAllowed,
                   "a finite number");
  }
}

template <typename Size>
void require_sizes(std::span<const Size> sizes) {
  check_argument(!sizes.empty(), "sizes is empty; it must hold at least one size");
  check_finite(sizes);
}

/// The upper boundary of a bucket that ends with `size`.
inline std::int64_t just_above(std::int64_t size) {
  check_argument(size < std::numeric_limits<std::int64_t>::max(), "the largest of sizes=", size,
                 kNotAllowed, "below 2^63 - 1");
  return size + 1;
}

inline double just_above(double size) {
  return std::nextafter(size, std::numeric_limits<double>::infinity());
}

inline constexpr std::uint64_t kSignBit = std::uint64_t{1} << 63;

/// 64-bit numbers in the same order as the sizes.
inline std::uint64_t key_of(std::int64_t size) {
  return static_cast<std::uint64_t>(size) ^ kSignBit;
}

inline std::uint64_t key_of(double size) {
  const auto bits = std::bit_cast<std::uint64_t>(size + 0.0);  // -0.0 and 0.0 are one size
  return (bits & kSignBit) != 0 ? ~bits : bits | kSignBit;
}

/// Ascending, with how often each occurs.
template <typename Size>
struct Distinct {
  std::vector<Size> sizes;
  std::vector<std::int64_t> counts;
};

template <typename Size>
Distinct<Size> distinct(std::span<const Size> sizes) {
  Distinct<Size> result;
  if constexpr (std::is_same_v<Size, std::int64_t>) {  // count whole sizes that are close together
    Size low = sizes[0];
    Size high = sizes[0];
    for (const Size size : sizes) {
      low = std::min(low, size);
      high = std::max(high, size);
    }
    const std::uint64_t range = key_of(high) - key_of(low);
    if (range <= 2 * sizes.size() + 4096) {
      std::vector<std::int64_t> counts(range + 1);
      for (const Size size : sizes) {
        ++counts[static_cast<std::size_t>(size - low)];
      }
      for (std::size_t i = 0; i < counts.size(); ++i) {
        if (counts[i] > 0) {
          result.sizes.push_back(low + static_cast<Size>(i));
          result.counts.push_back(counts[i]);
        }
      }
      return result;
    }
  }
  std::vector<std::uint64_t> keys(sizes.size());
  std::transform(sizes.begin(), sizes.end(), keys.begin(), [](Size size) { return key_of(size); });
  std::vector<std::uint32_t> order;
  DescendingSort()(std::span<const std::uint64_t>(keys), order);
  for (auto first = order.rbegin(); first != order.rend();) {
    const auto last = std::find_if(first, order.rend(),
                                   [&](std::uint32_t next) { return keys[next] != keys[*first]; });
    result.sizes.push_back(sizes[*first] + Size{0});  // not -0.0
    result.counts.push_back(last - first);
    first = last;
  }
  return result;
}

}  // namespace brim::batching::detail
