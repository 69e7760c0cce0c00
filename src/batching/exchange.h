#pragma once

#include <cstddef>
#include <span>

#include "batching/division.h"

namespace brim::batching::detail {

/// Items that count twice: their costs are to be equal in all parts, and the sum of a part's sizes
/// must not exceed the cap.
struct CappedItems {
  std::span<const double> costs;
  std::span<const double> sizes;
  double cap;
};

/// Evens a division out under the cap: as long as that lowers the largest cost of a part, an item
/// of the costliest part moves to a cheaper one, or changes places with an item of that. A part
/// that is over the cap gives, and never gets more.
///
/// The number of pairs that are looked at is proportional to the number of items.
///
/// @param keep_counts items only change places.
void exchange(const CappedItems& items, std::size_t parts, bool keep_counts, Division& division);

}  // namespace brim::batching::detail
