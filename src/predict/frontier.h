#pragma once

#include <brim/export.h>
#include <brim/predict/memory_model.h>

#include <cstdint>
#include <optional>
#include <span>
#include <utility>

namespace brim::detail {

using BatchShape = std::pair<std::int64_t, std::int64_t>;  ///< samples, and the longest

/// Which batch to measure next, so that batches can come closer to a limit: one of the length for
/// which the model leaves most of the limit unused. Empty if nearly all of it is used for every
/// length, and measurements of the shortest, a middle and the longest have confirmed that.
///
/// The batch is expected to stay within the limit, or is one sample of a length for which this is
/// not known. Pure logic.
/// @param model of batches.
/// @param lengths of samples: positive, ascending, at least one.
/// @param most the number of samples that a batch may have.
/// @param limit bytes.
/// @param caution share by which a batch may need more than expected.
[[nodiscard]] BRIM_API std::optional<BatchShape> next_at_the_limit(
    const MemoryModel& model, std::span<const std::int64_t> lengths, std::int64_t most,
    double limit, double caution);

}  // namespace brim::detail
