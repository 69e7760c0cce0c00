#pragma once

#include <brim/fit/padded_need.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "fit/fit_search.h"

namespace brim::detail {

/// Finds the limit of batches whose samples are padded in several sizes.
///
/// What a batch needs is estimated by a PaddedNeed, which decides how samples are batched; no trust
/// is put into it. All batches that a trial limit makes in some epochs are bounded
/// (JointNeedBound), and those with the highest bounds are measured, from which the estimate and
/// the bounds learn. When nothing more may be measured, the limit is lowered until no bound exceeds
/// the budget. At last the batches least like any measured one are measured, and one over the
/// budget starts the search again. Pure logic: measuring is a function that it is given.
///
/// @param features of all samples by index, `columns` of each one after the other.
/// @param probes the number of samples of which batches are measured first.
[[nodiscard]] FittedLimit fit_padded_sizes(const FitSearch& search,
                                           std::span<const std::int64_t> features,
                                           std::size_t columns, std::int64_t probes);

}  // namespace brim::detail
