#pragma once

#include <brim/export.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace brim {

/// A value that a program computes, such as the result of a layer.
struct ComputedValue {
  std::int64_t bytes = 0;  ///< SIZE of keeping it; not negative
  /// The values (their places in the list) that it can be recomputed from, all of them together.
  /// Without a list it cannot be recomputed; an empty list means that it is always there.
  std::optional<std::vector<std::size_t>> made_from;
};

/// Which values to keep, at the fewest bytes, so that every needed value is kept or can be
/// recomputed from kept ones. Exact: a minimum cut between the values that cannot be recomputed and
/// those that are needed. Of several such sets it is the one that recomputes least. Pure logic.
///
/// Example: `a` cannot be recomputed, `b = f(a)` and `c = g(a)` can, and `b` and `c` are needed.
/// Then `a` is kept if it is no larger than both together.
/// @param values in any order.
/// @param needed places in `values`; repetitions do not matter.
/// @returns for each value whether it is kept.
/// @throws c10::ValueError for negative bytes, and places that are not in the list.
[[nodiscard]] BRIM_API std::vector<bool> least_kept(std::span<const ComputedValue> values,
                                                    std::span<const std::size_t> needed);

}  // namespace brim
