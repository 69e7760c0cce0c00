#pragma once

#include <algorithm>
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

/// The largest number from `good` to `most` that `holds`, as above.
template <class Holds>
[[nodiscard]] std::int64_t largest_up_to(std::int64_t good, std::int64_t most, const Holds& holds) {
  return most > good && holds(most) ? most : largest_that_holds(good, most, holds);
}

/// What is used of a size that a model expects to fit. The model may be off by a step of padded
/// sizes, or by small tensors. Of few items none is spared.
template <class Number>
[[nodiscard]] constexpr Number with_headroom(Number size) {
  constexpr std::int64_t kSpareOf = 200;
  return size - static_cast<Number>(static_cast<std::int64_t>(size / kSpareOf));
}

/// A large size in (low, high], less what is spared, where both sizes hold; `low` if there is none.
/// Steps down are small, because some sizes hold between others that do not.
template <class Holds>
[[nodiscard]] std::int64_t largest_with_headroom(std::int64_t low, std::int64_t high,
                                                 const Holds& holds) {
  constexpr std::int64_t kStepOf = 256;
  for (std::int64_t size = high; size > low; size -= std::max<std::int64_t>(size / kStepOf, 1)) {
    const std::int64_t used = with_headroom(size);
    if (used > low && holds(size) && (used == size || holds(used))) {
      return used;
    }
  }
  return low;
}

}  // namespace brim::detail
