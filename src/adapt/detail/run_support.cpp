#include "adapt/detail/run_support.h"

#include <brim/adapt/detail/run.h>
#include <brim/memory/stats.h>

#include "memory/backend.h"

namespace brim {

bool may_run_unwatched(const AdaptOptions& options) noexcept {
  // A wrong option is left to the run, which says so before the function is called.
  return options.lower >= 1 && options.quantum >= 1 &&
         (options.memory == nullptr || !options.memory->may_know_something()) &&
         options.objective == Objective::memory && options.attempts == nullptr && !options.observer;
}

ReleasedError release_error(std::exception_ptr error) {
  ReleasedError released;
  released.cause = classify(error);
  if (!released.cause) {
    std::rethrow_exception(std::move(error));
  }
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& known) {
    released.message = known.what_without_backtrace();
  } catch (const std::exception& other) {
    released.message = other.what();
  }
  return released;  // `error` was the last reference: the exception ends here
}

void check_options(const AdaptOptions& options) {
  TORCH_CHECK_VALUE(options.lower >= 1, "lower must be 1 or more, got ", options.lower);
  TORCH_CHECK_VALUE(options.quantum >= 1, "quantum must be 1 or more, got ", options.quantum);
}

namespace {

/// What a file remembers may be of a device that this machine has not.
bool exists(c10::Device device) {
  try {
    resolve_device(device);
    return true;
  } catch (const c10::ValueError&) {
    return false;
  }
}

/// Whether there is clearly more room now where a size failed, or clearly less where it fitted.
bool outdated(const SizeFact& fact) {
  if (!exists(fact.device) || !fact.outcome.limit) {
    return !exists(fact.device);
  }
  constexpr double kClearly = 1.1;
  const auto then = static_cast<double>(*fact.outcome.limit - fact.outcome.held);
  const auto now = static_cast<double>(backend_for(fact.device).headroom(fact.device).free);
  return fact.outcome.fitted ? now * kClearly < then : now > then * kClearly;
}

SizeOutcome without_foreign_figures(SizeOutcome outcome, c10::Device of, c10::Device wanted) {
  if (of != wanted) {
    outcome.peak = outcome.requested = outcome.limit = std::nullopt;
  }
  return outcome;
}

}  // namespace

Recollection recall(const AdaptOptions& options) {
  Recollection result;
  if (options.memory != nullptr) {
    result.facts = options.memory->recall(options.key);
  }
  if (result.facts.empty()) {
    return result;
  }
  const c10::Device device = result.facts.back().device;
  if (!exists(device)) {
    return {};
  }
  std::erase_if(result.facts,
                [&](const SizeFact& fact) { return fact.device != device && outdated(fact); });
  for (SizeFact& fact : result.facts) {
    fact.outcome = without_foreign_figures(fact.outcome, fact.device, device);
  }
  result.device = device;
  result.available = backend_for(device).headroom(device).free;
  return result;
}

SizeOutcome FiguresOfOneDevice::operator()(SizeOutcome outcome, c10::Device device) {
  if (!device_) {
    device_ = device;
  }
  return without_foreign_figures(outcome, device, *device_);
}

double margin_on(c10::Device device) {
  constexpr double kAccelerator = 0.02;
  return device.is_cpu() ? SizeSearchOptions{}.margin : kAccelerator;
}

void learn(const AdaptOptions& options, const SizeFact& fact) {
  if (options.memory != nullptr) {
    options.memory->learn(options.key, fact);
  }
}

}  // namespace brim
