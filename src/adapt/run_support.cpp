#include "adapt/run_support.h"

#include <brim/adapt/run.h>

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

std::vector<SizeFact> recall(const AdaptOptions& options) {
  return options.memory != nullptr ? options.memory->recall(options.key) : std::vector<SizeFact>{};
}

void learn(const AdaptOptions& options, const SizeFact& fact) {
  if (options.memory != nullptr) {
    options.memory->learn(options.key, fact);
  }
}

}  // namespace brim
