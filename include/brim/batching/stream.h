#pragma once

#include <brim/batching/batching.h>
#include <brim/export.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace brim::batching {

/// Which of the ranks of a distributed job this one is.
struct BRIM_API Ranks {
  std::int64_t rank = 0;
  std::int64_t world_size = 1;
};

/// The seed of an epoch: epochs of one seed, and the same epoch of other seeds, are unlike each
/// other.
[[nodiscard]] BRIM_API std::uint64_t epoch_seed(std::uint64_t seed, std::uint64_t epoch);

/// Where an epoch stands for all ranks together: the same on each rank after the same number of
/// batches, and good for any number of ranks.
struct Position {
  /// How far the open block had been read by jobs of one world size.
  struct Segment {
    std::int64_t world_size;
    std::int64_t step_offset;  ///< batches of the first step that lie in the block before
    std::int64_t done;         ///< COUNT of batches read, by all ranks together

    friend bool operator==(const Segment&, const Segment&) = default;
  };

  Cursor cursor;                  ///< of the open block; empty at the beginning of an epoch
  std::vector<Segment> segments;  ///< more than one where the number of ranks has changed

  friend bool operator==(const Position&, const Position&) = default;
};

/// One rank's batches of an epoch, or all of them.
///
///     auto batching = brim::batching::packed_batching(columns, {.shuffle = true});
///     brim::batching::BatchStream mine(*batching, seed, {.rank = 2, .world_size = 8});
///     while (auto batch = mine.next()) { train(*batch); }
///
/// Every rank works out the same batches and takes every world_size-th: no communication, no sample
/// on two ranks, and the same number of batches on each. Batches of one step are chosen alike in
/// cost. Where the number of batches does not divide, a few of the last ones are split; only where
/// there are not enough samples to split are the last ones left out, and reported.
///
/// For one thread; streams do not disturb each other.
class BRIM_API BatchStream {
 public:
  /// Keeps a reference to `batching`. @throws std::invalid_argument if the rank is not from 0 to
  /// world_size - 1.
  BatchStream(const Batching& batching, std::uint64_t seed, Ranks ranks = {});
  ~BatchStream();
  BatchStream(BatchStream&&) noexcept;
  BatchStream& operator=(BatchStream&&) = delete;

  /// This rank's next batch, valid until the next call; empty at the end of the epoch.
  [[nodiscard]] std::optional<std::span<const std::int64_t>> next();

  /// The block that the last batch came from, in the order in which ranks take turns, and the
  /// number of blocks so far. For those who copy a block once rather than each batch.
  [[nodiscard]] const Batches& block() const { return block_; }
  [[nodiscard]] std::int64_t blocks_opened() const { return blocks_opened_; }

  /// Whether next() will have to work out another block, or find that there is none.
  [[nodiscard]] bool at_block_end() const {
    return blocks_opened_ == 0 || std::cmp_greater_equal(next_, block_.count());
  }

  /// COUNT of batches that next() has given.
  [[nodiscard]] std::int64_t given() const { return given_; }

  /// The position after `batches` of the batches that this stream gives (all so far by default).
  /// Costs no time. @throws std::invalid_argument if that is more than it has given.
  [[nodiscard]] Position position() const { return position(given_); }
  [[nodiscard]] Position position(std::int64_t batches) const;

  /// Goes on where a stream of the same Batching and seed stood, whatever its ranks. Works out one
  /// block. Only before the first next(). @throws std::invalid_argument if the position is not one
  /// of such a stream.
  void seek(const Position& position);

  /// COUNT of this rank's batches that are left. Works all of them out.
  [[nodiscard]] std::int64_t count_rest();

  /// Appends what is left of the epoch: this rank's batches, or, of rank 0 only, those of all ranks
  /// in turns. That is the end of the stream.
  void read_rest(Batches& batches, bool all_ranks = false);

  /// Samples that were left out so far, in addition to the Batching's own.
  [[nodiscard]] const std::vector<LeftOut>& left_out() const { return left_out_; }

 private:
  struct OpenedBlock {
    Cursor cursor;
    std::vector<Position::Segment> past;  // of other world sizes
    std::int64_t step_offset;             // of this world size
    std::int64_t done;                    // of this world size, before this stream
    std::int64_t start;                   // batches of all ranks since this stream began
  };

  [[nodiscard]] OpenedBlock block_ahead() const;
  bool open_block();
  void balance_block(std::int64_t world_size, std::int64_t step_offset,
                     std::vector<LeftOut>& left_out);
  bool reach_next();

  std::unique_ptr<BatchSource> source_;
  Ranks ranks_;
  Batches block_;
  std::vector<OpenedBlock> opened_;
  std::vector<Position::Segment> resume_segments_;
  std::vector<LeftOut> left_out_;
  std::int64_t blocks_opened_ = 0;
  std::int64_t given_ = 0;
  std::int64_t next_ = 0;  // this rank's next batch in the block, counted from its beginning
  bool more_ = true;
};

}  // namespace brim::batching
