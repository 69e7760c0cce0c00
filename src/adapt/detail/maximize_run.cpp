#include <brim/adapt/detail/run.h>
#include <brim/adapt/detail/throughput.h>

#include <algorithm>

#include "adapt/detail/attempt_monitor.h"
#include "adapt/detail/run_support.h"

namespace brim {

struct MaximizeRun::State {
  const AdaptOptions& options;
  AttemptMonitor monitor;
  ParameterSearchOptions wanted;
  ParameterSearch search;
  FiguresOfOneDevice figures;
  Rate rate;
  bool tried = false;  // a try has ended: the next one repeats work
};

namespace {

ParameterSearch make_search(ParameterSearchOptions search, const AdaptOptions& options,
                            const Recollection& recollection, c10::Device device) {
  search.strategy = options.strategy;
  search.start = Start::at_upper;
  search.revisit_floor = options.exact_halving;
  search.available = recollection.available;
  search.margin = margin_on(recollection.device.value_or(device));
  auto result = as_value_error([&] { return ParameterSearch(search); });
  for (const Attempt& attempt : recollection.attempts) {
    if (attempt.values.size() == search.parameters.size()) {
      result.remember(attempt);
    }
  }
  if (options.objective == Objective::throughput && search.parameters.size() == 1) {
    Parameter& only = search.parameters.front();
    const std::int64_t size =
        throughput_choice(recollection.attempts, result.next().front(), only.lower, only.quantum);
    if (size < result.next().front()) {
      only.maximum = size;
      return as_value_error([&] { return ParameterSearch(search); });
    }
  }
  return result;
}

}  // namespace

MaximizeRun::MaximizeRun(const ParameterSearchOptions& search, const AdaptOptions& options,
                         Checkpoint checkpoint, Rate rate, FirstTry first_try) {
  check_options(options);
  const c10::Device device = checkpoint.device();
  const Recollection recollection = first_try == FirstTry::ahead ? recall(options) : Recollection{};
  // NOLINTNEXTLINE(modernize-make-unique): an aggregate that cannot be moved
  state_.reset(new State{options, AttemptMonitor(options, std::move(checkpoint)), search,
                         make_search(search, options, recollection, device),
                         FiguresOfOneDevice(recollection.device), rate});
}

MaximizeRun::~MaximizeRun() = default;
MaximizeRun::MaximizeRun(MaximizeRun&&) noexcept = default;

std::span<const std::int64_t> MaximizeRun::values() const { return state_->search.next(); }

void MaximizeRun::begin() {
  if (state_->tried) {
    state_->monitor.checkpoint().restore_random_state();
  }
  state_->monitor.begin();
}

void MaximizeRun::fitted() {
  Attempt attempt = state_->monitor.fitted(values());
  if (state_->options.objective == Objective::throughput && attempt.seconds > 0) {
    const double items = state_->rate == Rate::items ? static_cast<double>(attempt.size()) : 1.0;
    attempt.rate = items / attempt.seconds;
  }
  learn(state_->options, attempt);
}

void MaximizeRun::failed(std::exception_ptr error) {
  const ReleasedError released = release_error(std::move(error));
  failed(released.cause, released.message);
}

void MaximizeRun::failed(const OomCause& cause, const std::string& message) {
  state_->tried = true;
  const auto attempt = state_->monitor.failed(values(), cause, message);
  if (!attempt) {
    return;
  }
  learn(state_->options, *attempt);
  state_->search.record(state_->figures(*attempt));
  if (!state_->search.finished() || state_->search.best()) {
    return;
  }
  if (!state_->monitor.wait_for_others()) {
    state_->monitor.give_up();
  }
  // Other calls had the memory. What is free now is what counts.
  state_->search =
      make_search(state_->wanted, state_->options, recall(state_->options), attempt->device);
}

}  // namespace brim
