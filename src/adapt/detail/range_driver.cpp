#include <brim/adapt/detail/driver.h>
#include <brim/adapt/detail/throughput.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>

#include "adapt/detail/attempt_monitor.h"
#include "adapt/detail/meeting.h"
#include "adapt/detail/searching.h"

namespace brim::detail {
namespace {

/// Whether a fit says nothing that is not known from `last`: most parts of a long range.
bool says_the_same(const Attempt& last, const Attempt& fit) {
  constexpr double kSame = 0.01;
  const auto a = static_cast<double>(last.peak.value_or(0));
  const auto b = static_cast<double>(fit.peak.value_or(0));
  return last.size() == fit.size() && std::abs(a - b) <= kSame * std::max(a, b);
}

/// The parts of one range, on this rank.
class Parts {
 public:
  Parts(std::int64_t start, std::int64_t end, std::int64_t upper, const AdaptOptions& options,
        TryPart part)
      : current_(start),
        end_(end),
        upper_(upper),
        lower_(std::min(options.lower, upper)),
        timed_(options.objective == Objective::throughput),
        options_(options),
        part_(part),
        known_(recall(options)),
        running_(std::in_place, options),
        monitor_(options, Checkpoint(options)),
        search_(make_search(upper, options, known_, monitor_.checkpoint().device())) {}

  bool left() const { return current_ < end_; }

  /// The step to take now.
  std::int64_t next() const {
    const std::int64_t size = search_.next();
    return timed_ && search_.finished()
               ? throughput_choice(known_.attempts, size, lower_, options_.quantum)
               : size;
  }

  /// Tries the next part, which is at most `step` long, and tells whether it fitted.
  bool run(std::int64_t step) {
    const std::int64_t size = std::min(step, end_ - current_);
    if (repeats_) {
      monitor_.checkpoint().restore_random_state();
    } else {
      saved_.reset();
      saved_ = save_state(options_);
      running_.emplace(options_);  // threads that wait for memory learn that a part has ended
      monitor_.renew(Checkpoint(options_));
    }
    monitor_.begin(false, !search_.finished() || !trace_, trace_,
                   size == search_.next() ? search_.expected() : std::nullopt);
    const std::optional<Failure> failure = part_(current_, current_ + size);
    repeats_ = failure.has_value();
    if (!failure) {
      current_ += size;
      record_fit(size);
      return true;
    }
    if (saved_) {
      saved_->put_back();
    }
    auto failed = monitor_.failed({&size, 1}, *failure);
    if (!failed) {
      return run(step);  // cached memory was in the way
    }
    record_failure(size, *failed, *failure);
    return false;
  }

 private:
  void record_fit(std::int64_t size) {
    Attempt fit = monitor_.fitted({&size, 1});
    fit.rate = rate(options_, fit, size);
    if (timed_ || !learned_ || !says_the_same(*learned_, fit)) {
      learn(options_, known_, fit);
      learned_ = fit;
    }
    trace_ = fit.trace ? fit.trace : trace_;
    known_.drop_foreign_bytes(fit);
    search_.record(fit);
    if (timed_) {
      add_attempt(known_.attempts, std::move(fit));
    }
  }

  void record_failure(std::int64_t size, Attempt& failed, const Failure& failure) {
    learn(options_, known_, failed);
    known_.drop_foreign_bytes(failed);
    search_.record(failed);
    if (cannot_repeat(options_)) {
      give_up_inside(failure);
    }
    if (size <= lower_) {
      monitor_.wait_for_others_or_give_up();
      known_ = recall(options_);
      search_ = make_search(upper_, options_, known_, failed.device);
    }
  }

  std::int64_t current_;
  std::int64_t end_;
  std::int64_t upper_;
  std::int64_t lower_;
  bool timed_;
  const AdaptOptions& options_;
  TryPart part_;
  AttemptHistory known_;
  std::optional<RunningCall> running_;
  AttemptMonitor monitor_;
  SizeSearch search_;
  std::optional<Attempt> learned_{};      // the last fit that was
  std::shared_ptr<const Trace> trace_{};  // of the last part that was recorded
  std::unique_ptr<SavedState> saved_{};
  bool repeats_ = false;
};

/// With other ranks, whose ranges may have other lengths. Until the step stays the same they
/// exchange messages after each part, then once at the end, or where a rank fails. A part that
/// fitted is not done again on any rank; a rank that has none left takes part in the exchanges
/// until all have none.
void range_together(Parts& parts, std::int64_t upper, Meeting& meeting) {
  const auto ask = [&] {
    const std::int64_t later = parts.next();
    const std::int64_t next = parts.left() ? later : upper;
    return meeting.exchange({.done = !parts.left(), .next = {&next, 1}, .later = {&later, 1}});
  };
  const Meeting::Values agreed = meeting.agreed();
  // With collectives inside, ranks whose ranges differ must know it before they wait for each
  // other.
  const bool asks = agreed.empty() || meeting.inside();
  std::int64_t step = asks ? ask().next.front() : std::min(agreed.front(), upper);
  bool settled = !agreed.empty() && step == std::min(agreed.front(), upper);
  for (bool first = !asks;; first = false) {
    meeting.trying({&step, 1});
    while (parts.left() && parts.run(step) && settled) {
    }
    const Meeting::Answer answer = ask();
    if (answer.done) {
      meeting.end(answer, first);
      return;
    }
    settled = answer.next.front() == step;
    step = answer.next.front();
  }
}

}  // namespace

void range(std::int64_t start, std::int64_t end, std::int64_t initial, const AdaptOptions& options,
           TryPart part) {
  TORCH_CHECK_VALUE(initial >= 1, "initial must be 1 or more, got ", initial);
  TORCH_CHECK_VALUE(start <= end, "start must not be after end, got ", start, " and ", end);
  TORCH_CHECK_VALUE(start >= 0 || end <= std::numeric_limits<std::int64_t>::max() + start,
                    "start and end must be less than 2^63 apart, got ", start, " and ", end);
  check_options(options);
  if (options.ranks != nullptr) {
    // Parts with collectives inside must be the same on all ranks.
    const std::string span =
        cannot_repeat(options) ? c10::str(" of ", start, " to ", end) : std::string();
    Meeting meeting(options, c10::str("range", span, " in steps of up to ", initial));
    meeting.run([&] {
      Parts parts(start, end, initial, options, part);
      range_together(parts, initial, meeting);
    });
  } else if (start != end) {
    Parts parts(start, end, std::min(initial, end - start), options, part);
    while (parts.left()) {
      parts.run(parts.next());
    }
  }
}

}  // namespace brim::detail
