#pragma once

#include <brim/batching/batching.h>
#include <brim/export.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace brim::batching {

struct EpochIndex;

/// Which of the ranks of a distributed job this one is.
struct BRIM_API Ranks {
  std::int64_t rank = 0;
  std::int64_t world_size = 1;
};

/// The seed of an epoch: different for each epoch of one seed, and for each seed of one epoch.
[[nodiscard]] BRIM_API std::uint64_t epoch_seed(std::uint64_t seed, std::uint64_t epoch);

/// How far an epoch has been read, by all ranks together: the same on each rank after the same
/// number of batches, and valid for any number of ranks.
struct Position {
  /// How far the open block had been read by jobs of one world size.
  struct Segment {
    std::int64_t world_size;
    std::int64_t step_offset;  ///< batches of the first step that lie in the block before
    std::int64_t done;         ///< the number of batches read, by all ranks together

    friend bool operator==(const Segment&, const Segment&) = default;
  };

  Cursor cursor;                  ///< of the open block; empty at the beginning of an epoch
  std::vector<Segment> segments;  ///< more than one if the number of ranks has changed

  friend bool operator==(const Position&, const Position&) = default;
};

/// A position as one line of text, to save it, and back:
///
///     file << brim::batching::to_string(stream.position()) << '\n';
///     …
///     std::getline(file, line);
///     stream.seek(brim::batching::parse_position(line));
///
/// @throws std::invalid_argument for a line that to_string did not write, or that was cut off. That
///     the position is one of the same samples and settings is for BatchStream::seek to find out.
[[nodiscard]] BRIM_API std::string to_string(const Position& position);
[[nodiscard]] BRIM_API Position parse_position(std::string_view line);

/// One rank's batches of an epoch, or all of them.
///
///     auto batching = brim::batching::packed_batching(columns, {.shuffle = true});
///     brim::batching::BatchStream mine(*batching, seed, {.rank = 2, .world_size = 8});
///     while (auto batch = mine.next()) { train(*batch); }
///
/// Every rank computes the same batches and takes every world_size-th: no communication, no sample
/// on two ranks, and the same number of batches on each. Batches of one step cost about the same.
/// If the number of batches does not divide, a few of the last ones are split; only if there are
/// too few samples to split are the last ones left out, and reported.
///
/// For one thread; streams do not disturb each other.
class BRIM_API BatchStream {
 public:
  /// Keeps a reference to `batching`. @throws std::invalid_argument if the rank is not from 0 to
  /// world_size - 1.
  BatchStream(const Batching& batching, std::uint64_t seed, Ranks ranks = {});
  /// Of a source that no Batching makes, and that may be unable to go back: an exception is the
  /// end.
  BatchStream(std::unique_ptr<BatchSource> source, Ranks ranks);
  ~BatchStream();
  BatchStream(BatchStream&&) noexcept;
  BatchStream& operator=(BatchStream&&) = delete;

  /// This rank's next batch, valid until the next call; empty at the end of the epoch. An exception
  /// (of a cost, of an InterruptionGuard) changes nothing: the next call tries again.
  [[nodiscard]] std::optional<std::span<const std::int64_t>> next();

  /// The block of the last batch, in the order in which ranks take turns, and the number of blocks
  /// so far. For callers that copy a block once rather than each batch.
  [[nodiscard]] const Batches& block() const { return block_; }
  [[nodiscard]] std::int64_t blocks_opened() const { return blocks_opened_; }

  /// The next block with the batches of all ranks in turns, valid until the next call; null at the
  /// end. Of a stream of rank 0 that is not read by next().
  [[nodiscard]] const Batches* next_block();

  /// Whether next() has to compute another block, or is at the end.
  [[nodiscard]] bool at_block_end() const {
    return blocks_opened_ == 0 || std::cmp_greater_equal(next_, block_.count());
  }

  /// Whether the last batch of the epoch has been given.
  [[nodiscard]] bool at_end() const { return blocks_opened_ > 0 && !more_ && at_block_end(); }

  /// The number of batches that next() has given.
  [[nodiscard]] std::int64_t given() const { return given_; }

  /// The position after `batches` of the batches that this stream gives (all so far by default).
  /// @throws std::invalid_argument if that is more than it has given.
  [[nodiscard]] Position position() const { return position(given_); }
  [[nodiscard]] Position position(std::int64_t batches) const;

  /// Resumes where a stream of the same Batching and seed stood, with any number of ranks. Computes
  /// one block. Only before the first next(). @throws std::invalid_argument if the position is not
  /// one of such a stream.
  void seek(const Position& position);

  /// Passes this many of this rank's next batches, or all that are left. Returns how many. With an
  /// index of this epoch it makes a few batches; otherwise it makes all of them. Positions in the
  /// blocks that were passed are then not known.
  std::int64_t skip(std::int64_t batches, const EpochIndex* index = nullptr);

  /// The number of this rank's remaining batches. As `skip`; afterwards there is nothing to read.
  [[nodiscard]] std::int64_t count_rest(const EpochIndex* index = nullptr);

  /// Appends the rest of the epoch: this rank's batches, or (rank 0 only) those of all ranks in
  /// turns. The stream is then at its end.
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
  std::int64_t jump(const EpochIndex& index, std::int64_t most);
  [[nodiscard]] static bool too_short(std::int64_t batches, std::int64_t rest,
                                      std::int64_t world_size);
  bool open_block();
  void fill_block(OpenedBlock& opened);
  void balance_block(std::int64_t world_size, std::int64_t step_offset,
                     std::vector<LeftOut>& left_out);
  bool reach_next();

  std::unique_ptr<BatchSource> source_;
  Ranks ranks_;
  Batches block_;
  Batches spare_;  // the block before
  std::vector<OpenedBlock> opened_;
  std::vector<Position::Segment> resume_segments_;
  std::vector<LeftOut> left_out_;
  std::int64_t blocks_opened_ = 0;
  std::int64_t given_ = 0;
  std::int64_t jumped_ = 0;       // batches of all ranks before the first opened block
  std::int64_t jumped_step_ = 0;  // those of them in the step that ends in that block
  std::int64_t next_ = 0;         // this rank's next batch in the block, counted from its beginning
  bool more_ = true;
  bool goes_back_;  // whether the source can be moved at any time
};

}  // namespace brim::batching
