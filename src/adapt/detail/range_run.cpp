#include <brim/adapt/detail/run.h>
#include <brim/adapt/detail/throughput.h>

#include <cmath>

#include "adapt/detail/attempt_monitor.h"
#include "adapt/detail/run_support.h"

namespace brim {
namespace {

SizeSearch make_search(std::int64_t upper, const AdaptOptions& options,
                       const Recollection& recollection, c10::Device device) {
  const SizeSearchOptions search{.strategy = options.strategy,
                                 .start = Start::probe,
                                 .upper = upper,
                                 .lower = std::min(options.lower, upper),
                                 .quantum = options.quantum,
                                 .margin = margin_on(recollection.device.value_or(device)),
                                 .available = recollection.available};
  auto result = as_value_error([&] { return SizeSearch(search); });
  result.remember(recollection.attempts);
  return result;
}

/// Whether a fit says nothing that is not known from `last`: most parts of a long range.
bool repeats(const Attempt& last, const Attempt& fit) {
  constexpr double kSame = 0.01;
  const auto near = [](double a, double b) { return std::abs(a - b) <= kSame * std::max(a, b); };
  return last.size() == fit.size() && near(static_cast<double>(last.peak.value_or(0)),
                                           static_cast<double>(fit.peak.value_or(0)));
}

}  // namespace

struct RangeRun::State {
  const AdaptOptions& options;
  AttemptMonitor monitor;
  // What this run knows; the rates of all sizes it took, for Objective::throughput.
  std::vector<Attempt> attempts;
  SizeSearch search;
  FiguresOfOneDevice figures;
  std::optional<Attempt> learned;  // the last fit that was
  std::int64_t upper;
  std::int64_t lower;
  bool repeats = false;
};

RangeRun::RangeRun(std::int64_t upper, const AdaptOptions& options) {
  TORCH_CHECK_VALUE(upper >= 1, "the initial step must be 1 or more, got ", upper);
  check_options(options);
  Checkpoint checkpoint(options);
  const c10::Device device = checkpoint.device();
  Recollection recollection = recall(options);
  const SizeSearch search = make_search(upper, options, recollection, device);
  // NOLINTNEXTLINE(modernize-make-unique): an aggregate that cannot be moved
  state_.reset(new State{options, AttemptMonitor(options, std::move(checkpoint)),
                         std::move(recollection.attempts), search,
                         FiguresOfOneDevice(recollection.device), std::nullopt, upper,
                         std::min(options.lower, upper)});
}

RangeRun::~RangeRun() = default;
RangeRun::RangeRun(RangeRun&&) noexcept = default;

std::int64_t RangeRun::step() const {
  const std::int64_t largest = state_->search.next();
  if (state_->options.objective == Objective::memory || !state_->search.finished()) {
    return largest;
  }
  return throughput_choice(state_->attempts, largest, state_->lower, state_->options.quantum);
}

void RangeRun::begin() {
  if (state_->repeats) {
    state_->monitor.checkpoint().restore_random_state();
  } else {
    state_->monitor.renew(Checkpoint(state_->options));
  }
  state_->monitor.begin();
}

void RangeRun::fitted(std::int64_t size) {
  state_->repeats = false;
  Attempt attempt = state_->monitor.fitted({&size, 1});
  state_->search.record(state_->figures(attempt));
  const bool timed = state_->options.objective == Objective::throughput;
  if (timed && attempt.seconds > 0) {
    attempt.rate = static_cast<double>(size) / attempt.seconds;
  }
  if (timed || !state_->learned || !repeats(*state_->learned, attempt)) {
    learn(state_->options, attempt);
    state_->learned = attempt;
  }
  if (timed) {
    add_attempt(state_->attempts, std::move(attempt));
  }
}

void RangeRun::failed(std::int64_t size, std::exception_ptr error) {
  const ReleasedError released = release_error(std::move(error));
  failed(size, released.cause, released.message);
}

void RangeRun::failed(std::int64_t size, const OomCause& cause, const std::string& message) {
  state_->repeats = true;
  const auto attempt = state_->monitor.failed({&size, 1}, cause, message);
  if (!attempt) {
    return;
  }
  learn(state_->options, *attempt);
  state_->search.record(state_->figures(*attempt));
  if (size > state_->lower) {
    return;
  }
  if (!state_->monitor.wait_for_others()) {
    state_->monitor.give_up();
  }
  // Other calls had the memory. What is free now is what counts.
  state_->search =
      make_search(state_->upper, state_->options, recall(state_->options), attempt->device);
}

}  // namespace brim
