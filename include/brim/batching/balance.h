#pragma once

#include <brim/batching/batches.h>
#include <brim/export.h>

#include <cstdint>
#include <span>

namespace brim::batching {

/// Divides items into parts of nearly equal cost: samples among microbatches, or batches among
/// ranks. Each part is a batch of the result, its indices ascending, its load the sum of its costs.
///
/// The costliest part costs no more than with the better of two methods: each item to the part that
/// costs least, the costliest item first (LPT), and the largest differencing method (Karmarkar and
/// Karp), which merges the latest of the divisions whose differences are equal. Differencing runs
/// on all items only if neither LPT nor differencing of some items comes within a billionth of
/// what no division can be below. The same on every machine.
///
/// @param equal_count the numbers of items in two parts differ by one at most.
/// @throws std::invalid_argument if `parts` is not from 1 to 2^24, or a cost is negative, NaN or
///     infinite, naming its index, or there are 2^31 costs or more.
///
/// @code
/// const Batches parts = balance(costs, 8);
/// for (std::size_t p = 0; p < parts.count(); ++p) { run(parts[p]); }
/// @endcode
[[nodiscard]] BRIM_API Batches balance(std::span<const double> costs, std::int64_t parts,
                                       bool equal_count = false);

/// What no part may exceed: the sum of the sizes of its items, such as tokens or bytes.
struct Cap {
  std::span<const double> sizes;  ///< of each item
  double most;
};

/// The same under a cap that holds for every part. If the parts of the function above are all under
/// it, these are the result. If not, each item goes to the part that costs least of those that have
/// room, the largest item first; where that leaves too little room, best fit packs the smaller
/// half, or all items. Then items are exchanged as long as the costliest part gets cheaper.
///
/// Sizes are summed exactly where double precision can, so whole ones are; other sums stay below
/// the cap by what rounding could add. With at least as many items as parts no part is empty.
///
/// @throws std::invalid_argument as above; if the sizes are not as many as the costs, or not finite
///     and not negative, or the cap is not positive; if an item exceeds it by itself, naming index
///     and size; if no such division was found, saying how many parts would do. With at least
///     `fewest_parts` one is always found.
[[nodiscard]] BRIM_API Batches balance(std::span<const double> costs, std::int64_t parts,
                                       const Cap& cap, bool equal_count = false);

/// The smallest number of parts that hold all items under a cap, rounded up to a multiple. For up
/// to some dozens of items it is the smallest possible; for many, what best fit decreasing needs.
/// Several ranks that need as many parts each take the largest of these numbers.
/// @throws std::invalid_argument as `balance`.
[[nodiscard]] BRIM_API std::int64_t fewest_parts(const Cap& cap, std::int64_t multiple_of = 1,
                                                 bool equal_count = false);

/// The ratio of linear to squared work for a hidden size of 4096: 6 · 4096 to 1.
inline constexpr int kLinearFlops = 24576;

/// The work of a transformer on a sequence, up to a factor: linear · length + squared · length².
[[nodiscard]] constexpr double flops(double length, double linear = kLinearFlops,
                                     double squared = 1.0) {
  return length * (linear + squared * length);
}

}  // namespace brim::batching
