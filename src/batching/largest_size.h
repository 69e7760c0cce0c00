#pragma once

#include <brim/batching/sample_sizes.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace brim::batching::detail {

/// The largest of the sizes, 0 of none. @throws std::invalid_argument naming the index of one that
/// is negative, NaN or infinite.
[[nodiscard]] std::int64_t largest_size(const SizeSpan<std::int64_t>& sizes);
[[nodiscard]] double largest_size(const SizeSpan<double>& sizes);

/// @throws std::invalid_argument unless there is a column, all are equally long, and not too long.
void check_lengths(const std::vector<std::size_t>& lengths);

}  // namespace brim::batching::detail
