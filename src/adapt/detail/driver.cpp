#include <brim/adapt/detail/driver.h>
#include <brim/adapt/detail/throughput.h>
#include <brim/adapt/parameter_search.h>
#include <brim/adapt/saved_state.h>
#include <brim/adapt/size_search.h>
#include <brim/memory/release.h>
#include <brim/memory/stats.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <stdexcept>
#include <utility>

#include "adapt/detail/attempt_monitor.h"
#include "adapt/detail/recollection.h"

namespace brim::detail {
namespace {

constexpr std::int64_t kOne = 1;

void check_options(const AdaptOptions& options) {
  TORCH_CHECK_VALUE(options.lower >= 1, "lower must be 1 or more, got ", options.lower);
  TORCH_CHECK_VALUE(options.quantum >= 1, "quantum must be 1 or more, got ", options.quantum);
}

/// The searches know no torch and throw std::invalid_argument: here it becomes a ValueError.
template <class Search, class Options>
Search checked(const Options& options) {
  try {
    return Search(options);
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

ParameterSearch make_search(const MaximizeCall& call, const AdaptOptions& options,
                            const Recollection& known, c10::Device device) {
  ParameterSearchOptions search{.strategy = options.strategy,
                                .groups = {call.groups.begin(), call.groups.end()},
                                .margin = known.margin(device),
                                .packs = known.packs(device),
                                .available = known.available,
                                .revisit_floor = options.exact_halving};
  for (std::size_t i = 0; i < call.maxima.size(); ++i) {
    const std::int64_t maximum = call.maxima[i];
    const std::int64_t quantum = call.quanta[i];
    search.parameters.push_back({.maximum = maximum,
                                 .quantum = quantum == 0 ? options.quantum : quantum,
                                 .lower = std::min(options.lower, std::max(maximum, kOne))});
  }
  auto result = checked<ParameterSearch>(search);
  for (const Attempt& attempt : known.attempts) {
    if (attempt.values.size() == search.parameters.size()) {
      result.remember(attempt);
    }
  }
  if (options.objective == Objective::throughput && search.parameters.size() == 1) {
    Parameter& only = search.parameters.front();
    const std::int64_t largest = result.next().front();
    only.maximum = throughput_choice(known.attempts, largest, only.lower, only.quantum);
    if (only.maximum < largest) {
      return checked<ParameterSearch>(search);
    }
  }
  return result;
}

SizeSearch make_search(std::int64_t upper, const AdaptOptions& options, const Recollection& known,
                       c10::Device device) {
  auto result = checked<SizeSearch>(SizeSearchOptions{.strategy = options.strategy,
                                                      .start = Start::probe,
                                                      .upper = upper,
                                                      .lower = std::min(options.lower, upper),
                                                      .quantum = options.quantum,
                                                      .margin = known.margin(device),
                                                      .packs = known.packs(device),
                                                      .available = known.available});
  result.remember(known.attempts);
  return result;
}

/// Calls of a wider kind learn from the first call of a new kind and from failures.
void learn(const AdaptOptions& options, const Recollection& known, const Attempt& attempt) {
  if (options.memory == nullptr) {
    return;
  }
  options.memory->learn(options.key, attempt);
  if (options.wider_key && (known.is_wider || !attempt.fitted())) {
    options.memory->learn(*options.wider_key, attempt);
  }
}

/// Saves what the options name. If there is no memory for the copies, garbage and caches make room
/// once. Null where nothing is named.
std::unique_ptr<SavedState> save_state(const AdaptOptions& options) {
  if (!options.restore) {
    return nullptr;
  }
  const auto save = [&] {
    auto state = std::make_unique<SavedState>();
    options.restore(*state);
    return state;
  };
  std::exception_ptr error;
  try {
    return save();
  } catch (...) {
    error = std::current_exception();
  }
  release_error(std::move(error));
  if (options.collect_garbage) {
    options.collect_garbage();
  }
  release_cached(options.device ? *options.device : default_device());
  return save();
}

double rate(const AdaptOptions& options, const Attempt& attempt, bool counts_items) {
  const bool timed = options.objective == Objective::throughput && attempt.seconds > 0;
  const double done = counts_items ? static_cast<double>(attempt.size()) : 1.0;
  return timed ? done / attempt.seconds : 0.0;
}

/// Whether a fit says nothing that is not known from `last`: most parts of a long range.
bool says_the_same(const Attempt& last, const Attempt& fit) {
  constexpr double kSame = 0.01;
  const auto a = static_cast<double>(last.peak.value_or(0));
  const auto b = static_cast<double>(fit.peak.value_or(0));
  return last.size() == fit.size() && std::abs(a - b) <= kSame * std::max(a, b);
}

}  // namespace

void maximize_watched(const MaximizeCall& call, Checkpoint&& checkpoint,
                      std::optional<Failure>&& failure, TryValues attempt) {
  const AdaptOptions& options = call.all_options ? call.all_options() : call.options;
  check_options(options);
  const auto saved = save_state(options);  // first: the copies count as memory that is not free
  if (saved) {
    checkpoint = Checkpoint(options);  // the copies are not the attempt's
  }
  // A first attempt was made at the maxima. What other calls have learned since would say that it
  // had been at their size.
  Recollection known = failure ? Recollection{} : recall(options);
  ParameterSearch search = make_search(call, options, known, checkpoint.device());
  AttemptMonitor monitor(options, std::move(checkpoint));
  for (bool repeats = false;; repeats = true) {
    if (!failure) {
      if (repeats) {
        monitor.checkpoint().restore_random_state();
      }
      monitor.begin(repeats ? !monitor.needed_release() : known.moves_to(search.next()));
      failure = attempt(search.next());
    }
    if (!failure) {
      Attempt fit = monitor.fitted(search.next());
      fit.rate = rate(options, fit, call.counts_items);
      learn(options, known, fit);
      if (monitor.needed_release()) {
        learn(options, known, *monitor.needed_release());
      }
      return;
    }
    if (saved) {
      saved->put_back();
    }
    auto failed = monitor.failed(search.next(), *std::exchange(failure, std::nullopt));
    if (!failed) {
      continue;
    }
    learn(options, known, *failed);
    known.drop_foreign_bytes(*failed);
    search.record(*failed);
    if (search.finished() && !search.best()) {
      monitor.wait_for_others_or_give_up();
      known = recall(options);
      search = make_search(call, options, known, failed->device);
    }
  }
}

Failure make_failure(const OomCause& cause, std::string text) {
  const bool silent = cause.kind == OomKind::host_memory && !classify_message(text);
  return {.cause = cause, .message = (silent ? "CPU out of memory. " : "") + std::move(text)};
}

Failure release_error(std::exception_ptr error) {
  const OomCause cause = classify(error);
  if (!cause) {
    std::rethrow_exception(std::move(error));
  }
  std::string text;
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& known) {
    text = known.what_without_backtrace();
  } catch (const std::exception& other) {
    text = other.what();
  }
  return make_failure(cause, std::move(text));  // `error` was the last reference: it ends here
}

void range(std::int64_t start, std::int64_t end, std::int64_t initial, const AdaptOptions& options,
           TryPart part) {
  TORCH_CHECK_VALUE(initial >= 1, "initial must be 1 or more, got ", initial);
  TORCH_CHECK_VALUE(start <= end, "start must not be after end, got ", start, " and ", end);
  TORCH_CHECK_VALUE(start >= 0 || end <= std::numeric_limits<std::int64_t>::max() + start,
                    "start and end must be less than 2^63 apart, got ", start, " and ", end);
  if (start == end) {
    return;
  }
  check_options(options);
  const std::int64_t upper = std::min(initial, end - start);
  const std::int64_t lower = std::min(options.lower, upper);
  const bool timed = options.objective == Objective::throughput;
  Recollection known = recall(options);
  std::optional<RunningCall> running(std::in_place, options);
  AttemptMonitor monitor(options, Checkpoint(options));
  SizeSearch search = make_search(upper, options, known, monitor.checkpoint().device());
  std::optional<Attempt> learned;  // the last fit that was
  std::unique_ptr<SavedState> saved;
  bool repeats = false;
  for (std::int64_t current = start; current < end;) {
    std::int64_t size = search.next();
    if (timed && search.finished()) {
      size = throughput_choice(known.attempts, size, lower, options.quantum);
    }
    size = std::min(size, end - current);
    if (repeats) {
      monitor.checkpoint().restore_random_state();
    } else {
      saved.reset();
      saved = save_state(options);
      running.emplace(options);  // threads that wait for memory learn that a part has ended
      monitor.renew(Checkpoint(options));
    }
    monitor.begin();
    const std::optional<Failure> failure = part(current, current + size);
    repeats = failure.has_value();
    if (failure && saved) {
      saved->put_back();
    }
    if (!failure) {
      current += size;
      Attempt fit = monitor.fitted({&size, 1});
      fit.rate = rate(options, fit, true);
      if (timed || !learned || !says_the_same(*learned, fit)) {
        learn(options, known, fit);
        learned = fit;
      }
      known.drop_foreign_bytes(fit);
      search.record(fit);
      if (timed) {
        add_attempt(known.attempts, std::move(fit));
      }
    } else if (auto failed = monitor.failed({&size, 1}, *failure)) {
      learn(options, known, *failed);
      known.drop_foreign_bytes(*failed);
      search.record(*failed);
      if (size <= lower) {
        monitor.wait_for_others_or_give_up();
        known = recall(options);
        search = make_search(upper, options, known, failed->device);
      }
    }
  }
}

std::int64_t chunk_dim(std::int64_t rank, std::int64_t dim) {
  TORCH_CHECK_VALUE(rank > 0, "tensor has no dimension to cut: it is a scalar, and dim is ", dim);
  TORCH_CHECK_VALUE(dim >= -rank && dim < rank, "dim must be from ", -rank, " to ", rank - 1,
                    " for a tensor of ", rank, " dimension(s), got ", dim);
  return dim < 0 ? dim + rank : dim;
}

}  // namespace brim::detail
