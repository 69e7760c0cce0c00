#pragma once

#include <brim/export.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace brim {

/// Another rank of the job failed or is gone, or the ranks do not do the same. Says which rank, at
/// which size and why.
///
/// Not a std::runtime_error, whose text would be searched for words about memory.
class BRIM_API RankError : public std::exception {
 public:
  explicit RankError(std::string text) : text_(std::move(text)) {}
  ~RankError() override;
  [[nodiscard]] const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

/// Carries small messages between the ranks of a job, beside its collectives. `brim/dist` has one
/// for torch.distributed. Of one channel, one exchange runs at a time.
class BRIM_API RankChannel {
 public:
  static constexpr std::size_t kLongestText = 1000;

  RankChannel() = default;
  RankChannel(const RankChannel&) = delete;
  RankChannel& operator=(const RankChannel&) = delete;
  virtual ~RankChannel();

  [[nodiscard]] virtual std::int64_t rank() const = 0;
  [[nodiscard]] virtual std::int64_t ranks() const = 0;

  /// Replaces each number by the least that any rank passed. Blocks until every rank has called it,
  /// with as many numbers. @throws RankError if a rank is gone or the time is over.
  virtual void least(std::span<std::int64_t> numbers) = 0;

  /// The text of every rank, by rank, cut to kLongestText. Blocks as `least` does.
  virtual std::vector<std::string> texts(const std::string& own) = 0;

  /// Around work with collectives inside: while on, this rank notices that another calls it off.
  virtual void watch(bool on) = 0;

  /// For such work, where the other ranks may wait for this one in a collective of the program:
  /// tells them why it ended, and makes them stop waiting as far as that is possible. The channel
  /// cannot be used afterwards.
  virtual void call_off(const std::string& reason) noexcept = 0;

  /// Whether a rank has called the work off: which, and why.
  virtual std::optional<std::pair<std::int64_t, std::string>> called_off() noexcept = 0;

  /// Set while a call of this channel runs: calls cannot be nested.
  std::atomic<bool> in_use{false};
  /// The number of calls of this channel so far.
  std::int64_t calls = 0;
};

/// When ranks that have settled on a size exchange messages.
enum class Sync : std::uint8_t {
  always,   ///< once in every call
  settled,  ///< in every 64th call; in between each rank acts alone, or votes: Agreement::Ending
};

/// Where the work has its collectives.
enum class Collectives : std::uint8_t {
  between,  ///< between two calls, none inside: a failure is repaired on all ranks
  inside,   ///< inside of the work: sizes start small and grow as far as is known to fit on every
            ///< rank, and a failure ends the call on every rank
};

/// How the ranks of a job agree.
struct AgreementOptions {
  bool per_rank = false;  ///< each rank keeps its own size; all learn whether all have fitted
  Sync sync = Sync::always;
  Collectives collectives = Collectives::between;

  /// @throws c10::ValueError for options that exclude each other.
  BRIM_API void check() const;
};

/// How the adaptive calls of one function agree among ranks: AdaptOptions::ranks. All ranks make
/// the same calls in the same order, and end each of them with the same size, or all with an error.
///
/// Keeps between calls which sizes the ranks agreed on. Used by one thread at a time.
class BRIM_API Agreement {
 public:
  using Values = std::vector<std::int64_t>;

  /// In place of a size: no rank has met a limit yet, each takes the length of its own argument.
  static constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::max();

  /// @param function what it is called, to tell that all ranks call the same.
  /// @throws c10::ValueError for options that exclude each other.
  explicit Agreement(std::shared_ptr<RankChannel> channel, const AgreementOptions& options = {},
                     std::string function = "");

  [[nodiscard]] const AgreementOptions& options() const noexcept { return options_; }
  [[nodiscard]] RankChannel& channel() const noexcept { return *channel_; }
  [[nodiscard]] const std::string& function() const noexcept { return function_; }

  /// Takes the place of a call that this rank cannot even begin, as for a wrong argument: the other
  /// ranks, which begin it, get a RankError with the reason. Without it this rank's next call would
  /// meet their present one. Nothing to do inside of another call, whose error will tell them.
  void refuse_call(const std::string& why);

  /// The reduction over all ranks that ends every call of a function.
  struct Ending {
    /// Tells along the way whether this rank is done and whether all are. With Sync::settled such a
    /// vote takes the place of the exchanges: as long as all vote yes there are none, and otherwise
    /// the ranks meet at once.
    std::function<bool(bool done)> vote{};
    /// Called when all ranks are done. Nothing comes in between, such as Ctrl-C, that could end the
    /// call on one rank alone while the others reduce. What it throws is not told to them.
    std::function<void()> run{};
  };
  /// For the calls that follow: both functions, or neither where they end without a reduction.
  /// @return what was set before.
  Ending end_with(Ending ending) { return std::exchange(ending_, std::move(ending)); }
  [[nodiscard]] const Ending& ending() const noexcept { return ending_; }

  /// For work in parts with collectives inside: as many parts must run on every rank, however long
  /// its own batch is. Then each call begins with an exchange of the lengths, and has no other.
  struct Lengths {
    std::int64_t own = 0;       ///< items of this rank's next batch; 0: the work has no parts
    std::int64_t shortest = 0;  ///< of all ranks, in the call that runs
    std::int64_t longest = 0;
    std::int64_t parts = 0;  ///< the number of parts in the attempt that runs

    /// Sets `parts` so that none has more items than `size` on any rank.
    /// @return the items of this rank's longest part.
    std::int64_t cut(std::int64_t size) noexcept;
  };
  Lengths lengths{};

  /// For attempts in which the ranks meet: each is made by all of them or by none, so that one that
  /// fitted is undone if another failed. For the calls that follow.
  /// @return what was set before.
  bool meet_in_attempts(bool meet) noexcept { return std::exchange(meets_, meet); }
  [[nodiscard]] bool meets_in_attempts() const noexcept { return meets_; }
  /// In such an attempt: this rank learned that another one failed, and stopped.
  void stop_attempt() noexcept { stopped_ = true; }
  /// Whether the attempt that ended was stopped. Asks once.
  [[nodiscard]] bool take_stopped() noexcept { return std::exchange(stopped_, false); }

  /// Whether the call that begins now makes no exchange, by Sync::settled. Counts the call.
  bool skips_a_call() noexcept;
  /// Tells how the exchanges of a call went: whether every rank used the size that it was expected
  /// to use, and wants to use it again. All ranks pass the same.
  void count_exchange(bool calm) noexcept { calm_calls_ = calm ? calm_calls_ + 1 : 0; }

  /// What holds for the next call of a kind.
  struct Agreed {
    Values values{};  ///< of all ranks; empty: none yet
    Values wish{};    ///< what this rank had asked for
  };
  [[nodiscard]] Agreed agreed(std::uint64_t key) const;
  void agree(std::uint64_t key, Agreed agreed);

 private:
  std::shared_ptr<RankChannel> channel_;
  AgreementOptions options_;
  std::string function_;
  Ending ending_;
  std::unordered_map<std::uint64_t, Agreed> agreed_;
  bool meets_ = false;
  bool stopped_ = false;
  int calm_calls_ = 0;  // in a row
  int skipped_ = 0;     // calls since the last exchange
};

}  // namespace brim
