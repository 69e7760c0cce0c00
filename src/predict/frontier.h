#pragma once

#include <brim/export.h>
#include <brim/predict/memory_model.h>

#include <cstdint>
#include <optional>
#include <span>
#include <utility>

namespace brim::detail {

using BatchShape = std::pair<std::int64_t, std::int64_t>;  ///< COUNT of samples, and the longest

/// Which batch to measure next, so that batches may come closer to a limit: of the length where the
/// model leaves most of the limit unused. Empty where it is all but used for every length, and
/// measurements of the shortest, a middle and the longest have confirmed that.
///
/// The batch is expected to stay within the limit, or is one sample of a length of which it is not
/// known whether it does. Pure logic.
/// @param model of batches.
/// @param lengths what samples may have: positive, ascending, at least one.
/// @param most COUNT of samples that a batch may have.
/// @param limit bytes.
/// @param caution share of what is expected that may come on top.
[[nodiscard]] BRIM_API std::optional<BatchShape> next_at_the_limit(
    const MemoryModel& model, std::span<const std::int64_t> lengths, std::int64_t most,
    double limit, double caution);

}  // namespace brim::detail
