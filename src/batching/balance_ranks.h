#pragma once

#include <brim/batching/batches.h>
#include <brim/export.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace brim::batching::detail {

/// Orders a block's batches for ranks that take turns, so that batches of one step cost about the
/// same.
///
/// @param step_offset the number of batches of the first step that are in the block before.
/// @param last whether the epoch ends with this block: then the last step is made complete by
///     splitting batches; what cannot be split is moved to `left_out`.
/// @return the number of batches before the first whole step.
BRIM_API std::size_t balance_ranks(Batches& block, std::int64_t world_size,
                                   std::int64_t step_offset, bool last,
                                   std::vector<LeftOut>& left_out);

/// Takes the first `count` batches away.
BRIM_API void drop_front(Batches& block, std::size_t count);

}  // namespace brim::batching::detail
