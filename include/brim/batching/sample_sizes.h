#pragma once

#include <brim/batching/cost.h>
#include <brim/export.h>

#include <cstdint>
#include <span>
#include <variant>
#include <vector>

namespace brim::batching {

/// Sizes of all samples by their index, and the budget that they count against. The caller owns the
/// sizes and keeps them, unchanged, for as long as anything made of them lives.
template <class T>
struct Column {
  std::span<const T> sizes;
  Limit limit;
};

/// One column a budget. Several budgets hold at once: nodes and edges of graphs, tokens and
/// samples. All columns have the same length.
template <class T>
using Columns = std::vector<Column<T>>;

/// Whole sizes are added up exactly, real ones in double precision and in the order of the batch.
using AnyColumns = std::variant<Columns<std::int64_t>, Columns<double>>;

/// COUNT of samples.
[[nodiscard]] BRIM_API std::int64_t sample_count(const AnyColumns& columns);

/// Rejects sizes that no batch could be made of.
/// @throws std::invalid_argument naming the index of a size that is negative, NaN or infinite; if
///     there is no column, or they differ in length, or there are 2³² samples or more.
BRIM_API void check_sizes(const AnyColumns& columns);

}  // namespace brim::batching
