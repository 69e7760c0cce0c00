#include <brim/batching/interruption.h>
#include <brim/batching/sample_index.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>

#include "batching/permutation.h"
#include "check_argument.h"

namespace brim::batching {
namespace {

std::uint64_t place_of(const Cursor& cursor) {
  std::uint64_t sum = cursor.size();
  for (const std::int64_t word : cursor) {
    sum = detail::mix(sum, static_cast<std::uint64_t>(word));
  }
  return sum;
}

}  // namespace

EpochIndex EpochIndex::make(const Batching& batching, std::uint64_t seed, std::int64_t world_size,
                            std::uint64_t between) {
  EpochIndex index;
  const std::unique_ptr<BatchSource> source = batching.epoch(seed);
  Batches block;
  for (bool more = true; more;) {
    check_interruption();
    Cursor cursor = source->cursor();
    const auto rest = static_cast<std::uint64_t>(source->rest());
    const std::uint64_t number = index.blocks.size();
    const std::uint64_t place = place_of(cursor);
    if (number == 0 || index.blocks[index.checkpoints.back().block].rest - rest >= between) {
      index.checkpoints.push_back({number, std::move(cursor)});
    }
    block.clear();
    more = source->fill(block, world_size);
    index.blocks.push_back({rest, block.count(), place});
  }
  // Not part of its own answer.
  index.ranks = 0;
  BatchStream stream(batching, seed, {.rank = 0, .world_size = world_size});
  index.batches_of_rank = static_cast<std::uint64_t>(stream.count_rest(&index));
  index.ranks = static_cast<std::uint64_t>(world_size);
  return index;
}

std::optional<std::size_t> EpochIndex::find(const BatchSource& source) const {
  const auto rest = static_cast<std::uint64_t>(source.rest());
  const auto found =
      std::lower_bound(blocks.begin(), blocks.end(), rest,
                       [](const Block& block, std::uint64_t there) { return block.rest > there; });
  if (found == blocks.end() || found->rest != rest || found->place != place_of(source.cursor())) {
    return std::nullopt;
  }
  return static_cast<std::size_t>(found - blocks.begin());
}

bool EpochIndex::seek(BatchSource& source, std::size_t block, std::int64_t world_size) const {
  const Cursor before = source.cursor();
  const std::optional<std::size_t> here = find(source);
  if (!here || *here >= block || block >= blocks.size()) {
    return here == block;
  }
  // Makes at least the last block before, to see that it is the one that was counted.
  const auto after = std::upper_bound(
      checkpoints.begin(), checkpoints.end(), block - 1,
      [](std::size_t to, const Checkpoint& checkpoint) { return to < checkpoint.block; });
  std::size_t at = *here;
  if (const Checkpoint& last = *std::prev(after); last.block > at) {
    source.seek(last.cursor);
    at = last.block;
  }
  Batches made;
  bool same = true;
  for (; same && at < block; ++at) {
    check_interruption();
    made.clear();
    same = source.fill(made, world_size) && made.count() == blocks[at].batches;
  }
  same = same && find(source) == block;
  if (!same) {
    source.seek(before);
  }
  return same;
}

// Passes blocks that the index knows, up to the one with the last of `most` batches of this rank,
// or up to the last block of the epoch, which has to be made: it is split for the ranks. Returns
// how many batches of this rank were passed. Blocks are joined as balance_block does.
std::int64_t BatchStream::jump(const EpochIndex& index, std::int64_t most) {
  const std::optional<std::size_t> first = index.find(*source_);
  if (!first) {
    return 0;
  }
  const std::int64_t world_size = ranks_.world_size;
  const OpenedBlock ahead = block_ahead();
  std::int64_t start = ahead.start;
  std::int64_t step_offset = ahead.step_offset;
  std::int64_t next = next_ - static_cast<std::int64_t>(block_.count());
  std::int64_t passed = 0;
  std::size_t block = *first;
  while (true) {
    std::size_t end = block;
    std::int64_t count = 0;
    bool more = true;
    do {
      count += static_cast<std::int64_t>(index.blocks[end++].batches);
      more = end < index.blocks.size();
    } while (more &&
             too_short(count, static_cast<std::int64_t>(index.blocks[end].rest), world_size));
    const std::int64_t mine = next < count ? (count - next + world_size - 1) / world_size : 0;
    if (!more || passed + mine > most) {
      break;
    }
    passed += mine;
    next += mine * world_size - count;
    start += count;
    step_offset = (step_offset + count) % world_size;
    block = end;
  }
  if (block == *first || !index.seek(*source_, block, world_size)) {
    return 0;
  }
  opened_.clear();
  block_.clear();
  next_ = next;
  jumped_ = start;
  jumped_step_ = step_offset;
  return passed;
}

std::int64_t BatchStream::skip(std::int64_t batches, const EpochIndex* index) {
  brim::detail::check_argument(batches >= 0, "batches must not be negative, got ", batches);
  std::int64_t skipped = 0;
  while (skipped < batches) {
    if (at_block_end() && index != nullptr && more_ && resume_segments_.empty()) {
      skipped += jump(*index, batches - skipped);
      index = nullptr;  // from here on blocks are made
    }
    if (skipped == batches || !reach_next()) {
      break;
    }
    const std::int64_t rest = static_cast<std::int64_t>(block_.count()) - next_;
    const std::int64_t mine =
        std::min((rest + ranks_.world_size - 1) / ranks_.world_size, batches - skipped);
    skipped += mine;
    next_ += mine * ranks_.world_size;
  }
  given_ += skipped;
  return skipped;
}

std::int64_t BatchStream::count_rest(const EpochIndex* index) {
  if (index != nullptr && blocks_opened_ == 0 && std::cmp_equal(index->ranks, ranks_.world_size)) {
    return static_cast<std::int64_t>(index->batches_of_rank);
  }
  return skip(std::numeric_limits<std::int64_t>::max(), index);
}

}  // namespace brim::batching
