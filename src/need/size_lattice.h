#pragma once

#include <algorithm>
#include <cstdint>

#include <brim/need/size_search.h>

#include "check_argument.h"

namespace brim::detail {

/// The sizes a search may propose: from `lower` to `upper`, all of them up to `quantum`, above it
/// its multiples, and both ends in any case. 0 stands for "there is none".
struct SizeLattice {
  std::int64_t lower;
  std::int64_t upper;
  std::int64_t quantum;

  /// The largest allowed size that is no larger than `size`.
  [[nodiscard]] std::int64_t floor(std::int64_t size) const noexcept {
    if (size >= upper) {
      return upper;
    }
    return size < lower ? 0 : std::max(lower, floor_to_multiple(size, quantum));
  }

  /// The smallest allowed size that is larger than `size`.
  [[nodiscard]] std::int64_t above(std::int64_t size) const noexcept {
    if (size < lower) {
      return lower;
    }
    if (size >= upper) {
      return 0;
    }
    if (size < quantum) {
      return size + 1;
    }
    // Compared in units of the quantum: the product may not be representable.
    const std::int64_t multiple = size / quantum + 1;
    return multiple > upper / quantum ? upper : multiple * quantum;
  }
};

/// @throws std::invalid_argument naming the option, its value and what is allowed.
template <class Name, class Number, class... Allowed>
void require(bool condition, const Name& name, Number value, const Allowed&... allowed) {
  check_argument(condition, name, "=", value, " is not allowed; it must be ", allowed...);
}

inline SizeLattice lattice(const SizeSearchOptions& options) noexcept {
  return {options.lower, options.upper, options.quantum};
}

}  // namespace brim::detail
