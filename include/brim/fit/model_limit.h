#pragma once

#include <brim/batching/cost.h>
#include <brim/export.h>
#include <brim/predict/memory_model.h>

#include <cstdint>

namespace brim {

/// A budget in bytes as a limit on batches, with a fitted memory model as the cost:
///
///     auto batching = bb::packed_batching(
///         bb::Columns<std::int64_t>{{lengths, brim::model_limit(model, 8'000'000'000)}});
///
/// A model of batches limits what it predicts for n samples padded to the longest, its margin
/// included. A model of one size limits the sum of the sizes. The model is copied.
/// @throws std::invalid_argument if the model is not fitted, `bytes` is not positive, or a model of
///     one size needs more than `bytes` for a batch of total size 1.
[[nodiscard]] BRIM_API batching::Limit model_limit(const MemoryModel& model, std::int64_t bytes);

}  // namespace brim
