#pragma once

#include <brim/export.h>
#include <brim/fit/fit_ranks.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace brim {

/// Gives all ranks the same number of steps where their numbers of batches differ and nobody knows
/// them ahead: each rank reads its own shards. A rank reads some batches ahead of its loop, and
/// once in so many steps the ranks tell each other how many they have.
///
///     brim::EvenSteps steps(channel, {.at_end = brim::EvenSteps::AtEnd::stop});
///     std::deque<Batch> held;
///     do {
///       while (steps.to_read() > 0) {
///         if (auto batch = reader.next()) { held.push_back(*batch); steps.read(); }
///         else { steps.end(); }
///       }
///     } while (steps.step() && (train(held.front()), held.pop_front(), true));
///
/// All ranks make one of these for each epoch, with the same options. Without a channel there is
/// one rank, which reads nothing ahead. For one thread.
class BRIM_API EvenSteps {
 public:
  enum class AtEnd : std::uint8_t {
    stop,    ///< all ranks stop after the last batch of the one that has fewest
    repeat,  ///< ranks that have fewer begin anew, until the one that has most is at its end
  };

  struct Options {
    AtEnd at_end = AtEnd::stop;
    /// The most batches that a rank holds, and of steps between two exchanges. Both begin with 1
    /// and double, so that the first step waits for one batch only.
    std::int64_t ahead = 8;
    /// Where a resumed epoch goes on: the number of its steps so far, and of this rank's batches if
    /// they have ended.
    std::int64_t done = 0;
    std::optional<std::int64_t> total = {};
  };

  /// @throws std::invalid_argument if `ahead` is not positive, or a number is negative.
  EvenSteps(std::shared_ptr<RankChannel> channel, const Options& options);

  /// How many batches to read now. At most two per step, unless a step needs one at once.
  [[nodiscard]] std::int64_t to_read() const;
  /// One was read.
  void read() { ++read_; }
  /// There are no more. With AtEnd::repeat the next one that is read is this rank's first.
  /// @throws std::invalid_argument with AtEnd::repeat, if there was none at all.
  void end();

  /// A number made of this rank's first batch, before the first step: ranks that all begin alike
  /// probably read the same samples. Not 0.
  void compare(std::int64_t first) { first_ = first; }
  [[nodiscard]] bool all_begin_alike() const { return alike_; }

  /// Whether there is another step, for which every rank has a batch. Only when to_read() is 0.
  /// @throws RankError on all ranks if one has failed, or has other options.
  [[nodiscard]] bool step();

  /// Whether the next step() talks to the other ranks.
  [[nodiscard]] bool agrees_next() const { return steps_ == agreed_ && !ended_; }
  /// For a rank that cannot read on: the others get a RankError with the reason. Only when
  /// agrees_next(): until then the others count on this rank's steps, for which it has batches.
  void fail(const std::string& why) noexcept;

  /// The number of steps so far, and of batches that were read, both with those before it resumed.
  [[nodiscard]] std::int64_t steps() const { return steps_; }
  [[nodiscard]] std::int64_t batches_read() const { return read_; }
  /// The number of this rank's batches, once it is known.
  [[nodiscard]] std::optional<std::int64_t> total() const { return total_; }
  /// Whether all ranks have told that there is no further step.
  [[nodiscard]] bool ended() const { return ended_; }
  /// The number of exchanges so far.
  [[nodiscard]] std::int64_t exchanges() const { return exchanges_; }

 private:
  void agree();

  std::optional<FitRanks> ranks_;  // none: one rank
  Options options_;
  std::optional<std::int64_t> total_;
  std::int64_t read_;
  std::int64_t steps_;
  std::int64_t agreed_;  // steps that all ranks can make
  std::int64_t window_ = 1;
  std::int64_t exchanges_ = 0;
  std::int64_t first_ = 0;
  bool alike_ = false;
  bool ended_ = false;
};

}  // namespace brim
