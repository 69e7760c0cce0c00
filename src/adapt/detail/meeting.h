#pragma once

#include <brim/adapt/agreement.h>
#include <brim/adapt/options.h>

#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <vector>

namespace brim::detail {

/// The exchanges between ranks in one adaptive call. They are all alike: each rank says whether it
/// is done and which values it wants next, and all learn the least. So it does not matter if one
/// rank has already tried a size when another only asks for the first.
///
/// Where ranks keep their own sizes (per_rank), they only learn that all are done; in calls without
/// an exchange (Sync::settled) not even that. The answer is then as if this rank were the only one.
/// A function that lets its ranks vote knows that all are done and want nothing else; if not, the
/// exchange is made after all.
class Meeting {
 public:
  using Values = Agreement::Values;

  struct Message {
    bool done = false;                      ///< this rank fitted at `next`, or has no work left
    std::span<const std::int64_t> next{};   ///< the values for its next attempt, or those it fitted
    std::span<const std::int64_t> later{};  ///< the values for its next call
  };
  /// The same on every rank.
  struct Answer {
    bool done = false;  ///< every rank is
    bool same = false;  ///< all had the same `next`
    Values next{};
    Values later{};
  };

  /// @param what kind of call this is and from which values it starts: equal on all ranks.
  /// @throws c10::Error inside of another call of the same channel.
  Meeting(const AdaptOptions& options, const std::string& what);
  ~Meeting();
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  [[nodiscard]] bool inside() const noexcept {
    return agreement_.options().collectives == Collectives::inside;
  }
  /// Whether this call begins with an exchange of the lengths, and has no other.
  [[nodiscard]] bool begins_with_lengths() const noexcept {
    return inside() && agreement_.lengths.own > 0;
  }
  /// The size of this rank's longest part, where no part on any rank exceeds `size`.
  [[nodiscard]] std::int64_t cut(std::int64_t size) { return agreement_.lengths.cut(size); }

  /// The values that earlier calls agreed on for this one; empty: none.
  [[nodiscard]] Values agreed() const { return agreement_.agreed(options_.key).values; }

  /// @throws RankError if another rank has failed, or is in another call.
  Answer exchange(const Message& message);

  /// The call ended on every rank, which settles what holds for the next one.
  /// @param as_agreed whether the first exchange ended it, at the values that had been agreed on.
  void end(const Answer& last, bool as_agreed);

  /// The values of the attempt that begins, for messages.
  void trying(std::span<const std::int64_t> values) {
    trying_.assign(values.begin(), values.end());
  }

  /// This rank ends the call with this error.
  void tell_others(const std::string& own);

  /// Runs the call. An error that it throws reaches the other ranks as a RankError.
  template <class Work>
  void run(const Work& work) {
    std::exception_ptr error;
    try {
      work();
      return;
    } catch (const RankError&) {
      throw;  // the others have it too
    } catch (...) {
      error = std::current_exception();
    }
    tell_others(error);
    std::rethrow_exception(std::move(error));
  }

 private:
  /// Whether an exchange could change nothing, as far as this rank knows.
  [[nodiscard]] bool is_content(const Message& message) const;
  void tell_others(const std::exception_ptr& error);
  [[noreturn]] void throw_failures();
  [[noreturn]] void throw_differences();
  [[nodiscard]] std::string sizes_text() const;

  const AdaptOptions& options_;
  Agreement& agreement_;
  RankChannel& channel_;
  std::string what_;
  bool silent_;  // this call makes no exchange
  bool vote_failed_ = false;
  Values trying_;
  Values wish_;  // this rank's for its next call, as of the last exchange
};

}  // namespace brim::detail
