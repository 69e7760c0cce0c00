#pragma once

#include <brim/batching/batching.h>
#include <brim/batching/sample_sizes.h>
#include <brim/export.h>

#include <memory>
#include <span>

namespace brim::batching {

/// The batches of another Batching, in steps of equal work: under a budget in tokens, a step of
/// several ranks takes as long as the batch with most work, and batches that are equally full may
/// differ in work, as long documents cost more per token.
///
/// Batches of like work form a step. Then samples of a step's batches are exchanged as long as the
/// largest work falls, never over the budget. The number of batches stays the same, and with one
/// rank nothing changes.
///
///     auto packed = packed_batching(columns, {.shuffle = true});
///     auto even = even_work(packed, columns, work);  // work[i] = flops(lengths[i])
///     BatchStream mine(*even, seed, {.rank = 2, .world_size = 8});
///
/// @param batching of samples that are packed: its batches cost a sum of sizes.
/// @param columns the same as those of `batching`.
/// @param work of each sample; kept as a reference. That of a batch is the sum.
/// @throws std::invalid_argument if the costs of `columns` are not sums or counts; if `work` is
///     not as many as the sizes, or not finite and not negative, naming the index.
[[nodiscard]] BRIM_API std::shared_ptr<const Batching> even_work(
    std::shared_ptr<const Batching> batching, AnyColumns columns, std::span<const double> work);

}  // namespace brim::batching
