#include <brim/batching/interruption.h>
#include <brim/batching/sample_sizes.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <type_traits>

#include "batching/permutation.h"
#include "batching/sample_table.h"
#include "check_argument.h"

namespace brim::batching {
namespace detail {

// Positions inside batches are kept in 32 bits.
constexpr std::size_t kMostSamples = std::numeric_limits<std::uint32_t>::max();

// One pass over memory and no branch in it: 10 million sizes in a few milliseconds.
template <class T>
T largest_size(const SizeSpan<T>& sizes) {
  check_interruption();
  return sizes.visit([]<class Stored>(std::span<const Stored> stored) {
    constexpr Stored kMost = std::numeric_limits<Stored>::max();
    Stored largest = 0;
    Stored smallest = 0;
    [[maybe_unused]] std::size_t not_finite = 0;  // NOLINT(misc-const-correctness): not of integers
    for (const Stored size : stored) {
      largest = size > largest ? size : largest;
      smallest = size < smallest ? size : smallest;
      if constexpr (std::is_floating_point_v<Stored>) {
        not_finite += static_cast<std::size_t>(!(size <= kMost));
      }
    }
    if (smallest != 0 || not_finite > 0) {
      const auto wrong = std::find_if_not(stored.begin(), stored.end(), [](Stored size) {
        return !std::signbit(static_cast<double>(size) + 0.0) && size <= kMost;
      });
      check_argument(false, "sizes must be finite and not negative, got ", static_cast<T>(*wrong),
                     " at index ", wrong - stored.begin());
    }
    return static_cast<T>(largest);
  });
}

template <class T>
void check_lengths(const Columns<T>& columns) {
  check_argument(!columns.empty(), "there must be at least one column of sizes with its budget");
  const std::size_t samples = columns[0].sizes.size();
  check_argument(samples < kMostSamples, "there must be fewer than 2^32 samples, got ", samples);
  for (const Column<T>& column : columns) {
    check_argument(column.sizes.size() == samples, "columns of sizes must be equally long, got ",
                   samples, " and ", column.sizes.size());
  }
}

template std::int64_t largest_size(const SizeSpan<std::int64_t>&);
template double largest_size(const SizeSpan<double>&);
template void check_lengths(const Columns<std::int64_t>&);
template void check_lengths(const Columns<double>&);

}  // namespace detail

template <class T>
std::uint64_t fingerprint(const SizeSpan<T>& sizes) {
  return sizes.visit([](auto stored) {
    return detail::mix(0, stored.size()) + detail::fingerprint_part(stored, 0);
  });
}

template std::uint64_t fingerprint(const SizeSpan<std::int64_t>&);
template std::uint64_t fingerprint(const SizeSpan<double>&);

void check_sizes(const AnyColumns& columns) {
  std::visit(
      [](const auto& some) {
        detail::check_lengths(some);
        for (const auto& column : some) {
          (void)detail::largest_size(column.sizes);
        }
      },
      columns);
}

}  // namespace brim::batching
