#pragma once

#include <brim/export.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "fit/fit_search.h"

namespace brim::detail {

/// What a unit of each feature of a sample (nodes, edges) adds to the need of a batch, in bytes.
///
/// For each feature, batches of samples that have most of it in proportion are measured, of growing
/// length until they use half of the limit. How the need grows there from one batch to a longer one
/// gives one equation; the weights are the solution that is closest and not negative. What remains
/// unexplained is left to the search for a limit, which measures the batches themselves.
///
/// @param features sample after sample, `columns` of each, not negative.
[[nodiscard]] BRIM_API std::vector<double> feature_weights(std::span<const std::int64_t> features,
                                                           std::size_t columns, double limit,
                                                           const MeasureBatch& measure);

}  // namespace brim::detail
