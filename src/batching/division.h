#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace brim::batching::detail {

/// The part of each item, and the largest sum of a part's costs.
struct Division {
  std::vector<std::uint32_t> part;
  double largest = 0.0;
};

/// Divides items whose costs were checked; see balance.h. Parts beyond the items stay empty.
[[nodiscard]] Division divide(std::span<const double> costs, std::size_t parts, bool equal_count);

}  // namespace brim::batching::detail
