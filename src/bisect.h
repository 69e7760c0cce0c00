#pragma once

#include <cstdint>

namespace brim::detail {

/// The largest number from `good` on that `holds`, where `holds(good)` is taken for granted,
/// `holds(bad)` is false, and what holds at a number holds at all between `good` and it.
template <class Holds>
[[nodiscard]] std::int64_t largest_that_holds(std::int64_t good, std::int64_t bad,
                                              const Holds& holds) {
  while (bad - good > 1) {
    const std::int64_t middle = good + (bad - good) / 2;
    (holds(middle) ? good : bad) = middle;
  }
  return good;
}

}  // namespace brim::detail
