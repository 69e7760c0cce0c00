#include <brim/adapt/run.h>
#include <brim/adapt/throughput.h>

#include <algorithm>

#include "adapt/attempt_monitor.h"
#include "adapt/run_support.h"
#include "memory/backend.h"

namespace brim {

struct MaximizeRun::State {
  const AdaptOptions& options;
  AttemptMonitor monitor;
  ParameterSearch search;
  Rate rate;
  bool tried = false;  // a try has ended: the next one repeats work
};

namespace {

ParameterSearch make_search(ParameterSearchOptions search, const AdaptOptions& options,
                            c10::Device device) {
  check_options(options);
  const std::vector<SizeFact> facts = recall(options);
  search.strategy = options.strategy;
  search.start = Start::at_upper;
  search.revisit_floor = options.exact_halving;
  if (!facts.empty()) {
    search.available = backend_for(device).room(device).free;
  }
  auto result = as_value_error([&] { return ParameterSearch(search); });
  for (const SizeFact& fact : facts) {
    if (fact.values.size() == search.parameters.size()) {
      result.remember(fact.values, fact.outcome);
    }
  }
  if (options.objective == Objective::throughput && search.parameters.size() == 1) {
    Parameter& only = search.parameters.front();
    const std::int64_t size =
        throughput_choice(facts, result.next().front(), only.lower, only.quantum);
    if (size < result.next().front()) {
      only.maximum = size;
      return as_value_error([&] { return ParameterSearch(search); });
    }
  }
  return result;
}

}  // namespace

MaximizeRun::MaximizeRun(ParameterSearchOptions search, const AdaptOptions& options,
                         Checkpoint checkpoint, Rate rate) {
  const c10::Device device = checkpoint.device();
  state_ = std::unique_ptr<State>(new State{options, AttemptMonitor(options, std::move(checkpoint)),
                                            make_search(std::move(search), options, device), rate});
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
  const auto result = state_->monitor.fitted(values());
  const double items = state_->rate == Rate::items ? static_cast<double>(values().front()) : 1.0;
  learn(state_->options, {.values = {values().begin(), values().end()},
                          .outcome = result.outcome,
                          .rate = result.seconds > 0 ? items / result.seconds : 0.0});
}

void MaximizeRun::failed(std::exception_ptr error) {
  const ReleasedError released = release_error(std::move(error));
  failed(released.cause, released.message);
}

void MaximizeRun::failed(const OomCause& cause, const std::string& message) {
  state_->tried = true;
  const auto result = state_->monitor.failed(values(), cause, message);
  if (result.try_same_again) {
    return;
  }
  learn(state_->options,
        {.values = {values().begin(), values().end()}, .outcome = result.outcome, .rate = 0.0});
  state_->search.record(result.outcome);
  if (state_->search.finished() && !state_->search.best()) {
    state_->monitor.give_up();
  }
}

}  // namespace brim
