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
bool outdated(const Attempt& attempt) {
  if (!exists(attempt.device) || !attempt.available) {
    return !exists(attempt.device);
  }
  constexpr double kClearly = 1.1;
  const auto then = static_cast<double>(*attempt.available);
  const auto now = static_cast<double>(backend_for(attempt.device).headroom(attempt.device).free);
  return attempt.fitted() ? now * kClearly < then : now > then * kClearly;
}

void drop_foreign_figures(Attempt& attempt, c10::Device wanted) {
  if (attempt.device != wanted) {
    attempt.peak = attempt.requested = attempt.available = std::nullopt;
  }
}

}  // namespace

Recollection recall(const AdaptOptions& options) {
  Recollection result;
  if (options.memory != nullptr) {
    result.attempts = options.memory->recall(options.key);
  }
  if (result.attempts.empty()) {
    return result;
  }
  const c10::Device device = result.attempts.back().device;
  if (!exists(device)) {
    return {};
  }
  std::erase_if(result.attempts, [&](const Attempt& attempt) {
    return attempt.device != device && outdated(attempt);
  });
  for (Attempt& attempt : result.attempts) {
    drop_foreign_figures(attempt, device);
  }
  result.device = device;
  result.available = backend_for(device).headroom(device).free;
  return result;
}

Attempt FiguresOfOneDevice::operator()(Attempt attempt) {
  if (!device_) {
    device_ = attempt.device;
  }
  drop_foreign_figures(attempt, *device_);
  return attempt;
}

double margin_on(c10::Device device) {
  constexpr double kAccelerator = 0.02;
  return device.is_cpu() ? SizeSearchOptions{}.margin : kAccelerator;
}

void learn(const AdaptOptions& options, const Attempt& attempt) {
  if (options.memory != nullptr) {
    options.memory->learn(options.key, attempt);
  }
}

}  // namespace brim
