#include "adapt/detail/searching.h"

#include <brim/adapt/agreement.h>
#include <brim/adapt/detail/throughput.h>
#include <brim/memory/release.h>
#include <brim/memory/stats.h>
#include <brim/predict/allocator_settings.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "memory/backend.h"

namespace brim::detail {
namespace {

constexpr std::int64_t kOne = 1;

/// Torch's settings of its allocator. What the model does not follow is as without it.
const AllocatorOptions& allocator_options() {
  static const AllocatorOptions options = [] {
    try {
      return parse_allocator_settings(allocator_settings_in_environment()).options;
    } catch (const std::invalid_argument&) {  // torch itself will say so
      return AllocatorOptions{};
    }
  }();
  return options;
}

/// The device's allocator as it is; empty where the device does not tell.
std::optional<AllocatorModel> allocator_now(c10::Device device) {
  DeviceBackend& backend = backend_for(device);
  const auto segments = backend.segments(device);
  if (!segments) {
    return std::nullopt;
  }
  AllocatorOptions options = allocator_options();
  const auto room = backend.headroom(device);
  options.capacity = room.allocated + room.free;
  options.beyond = room.reservable - options.capacity;
  try {
    return AllocatorModel(options, *segments);
  } catch (const std::invalid_argument&) {  // not as the model knows segments
    return std::nullopt;
  }
}

/// What the next attempt finds. Where a failure is final on all ranks, much stays free:
/// collectives that overlap with the work make the need of the same size vary (by 6 % for a small
/// FSDP model).
/// @param otherwise the device of a call of which nothing is known.
Circumstances circumstances(const AdaptOptions& options, const AttemptHistory& known,
                            c10::Device otherwise) {
  constexpr double kInside = 0.5;
  const c10::Device device = known.device.value_or(otherwise);
  return {.available = known.available,
          .packs = device.is_cpu(),
          .margin = cannot_repeat(options) ? kInside : 0.0,
          .allocator = [=] { return allocator_now(device); },
          .in_use = blocks_in_use(device)};
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

}  // namespace

std::function<bool(std::int64_t)> blocks_in_use(c10::Device device) {
  return [device](std::int64_t address) {
    EventLog* log = backend_for(device).log();
    return log != nullptr && log->is_in_use(static_cast<std::uintptr_t>(address));
  };
}

void check_options(const AdaptOptions& options) {
  TORCH_CHECK_VALUE(options.lower >= 1, "lower must be 1 or more, got ", options.lower);
  TORCH_CHECK_VALUE(options.quantum >= 1, "quantum must be 1 or more, got ", options.quantum);
}

ParameterSearch make_search(const MaximizeCall& call, const AdaptOptions& options,
                            const AttemptHistory& known, const PartTrials& trials,
                            c10::Device device) {
  ParameterSearchOptions search{.strategy = options.strategy,
                                .start = cannot_repeat(options) ? Start::probe : Start::at_upper,
                                .groups = {call.groups.begin(), call.groups.end()},
                                .circumstances = circumstances(options, known, device),
                                .cautious = known.others_failed,
                                .revisit_floor = options.exact_halving};
  if (!call.foreseen.empty() && !search.circumstances.available) {
    search.circumstances.available = backend_for(device).headroom(device).free;
  }
  for (std::size_t i = 0; i < call.maxima.size(); ++i) {
    const std::int64_t maximum = call.maxima[i];
    const std::int64_t quantum = call.quanta[i];
    search.parameters.push_back({.maximum = maximum,
                                 .quantum = quantum == 0 ? options.quantum : quantum,
                                 .lower = std::min(options.lower, std::max(maximum, kOne))});
  }
  auto result = checked<ParameterSearch>(search);
  const bool timed = options.objective == Objective::throughput && search.parameters.size() == 1;
  // Calls are timed that an objective of memory does not even measure, since nothing has failed
  // yet: then their bytes must not make the size smaller. Nor where calls gave values up, and would
  // give up more: bytes do not limit them.
  std::vector<Attempt> attempts(call.foreseen.begin(), call.foreseen.end());
  attempts.insert(attempts.end(), known.attempts.begin(), known.attempts.end());
  const bool gave_up =
      std::ranges::any_of(attempts, [](const Attempt& attempt) { return attempt.given_up > 0; });
  if (!(timed || gave_up || trials.any()) || !std::ranges::all_of(attempts, &Attempt::fitted)) {
    result.remember(attempts);
  }
  if (timed || trials.any()) {
    Parameter& only = search.parameters.front();
    const std::int64_t by_bytes = result.next().front();
    const std::int64_t largest = std::max(by_bytes, trials.largest(known.attempts, only.maximum));
    only.maximum = timed ? throughput_choice(known.attempts, largest, only.lower, only.quantum)
                         : trials.choose({only.lower, largest, only.quantum});
    if (only.maximum != by_bytes) {
      return checked<ParameterSearch>(search);
    }
  }
  return result;
}

SizeSearch make_search(std::int64_t upper, const AdaptOptions& options, const AttemptHistory& known,
                       c10::Device device) {
  auto result = checked<SizeSearch>(
      SizeSearchOptions{.strategy = options.strategy,
                        .start = Start::probe,
                        .upper = upper,
                        .lower = std::min(options.lower, upper),
                        .quantum = options.quantum,
                        .circumstances = circumstances(options, known, device)});
  result.remember(known.attempts);
  return result;
}

void learn(const AdaptOptions& options, const AttemptHistory& known, const Attempt& attempt) {
  if (options.memory == nullptr) {
    return;
  }
  // Its own key last: where a memory is full, it is the one to stay.
  for (const auto& wider : {hinting_kind(options), options.wider_key}) {
    if (wider && (known.is_wider || !attempt.fitted())) {
      options.memory->learn(*wider, attempt);
    }
  }
  options.memory->learn(options.key, attempt);
}

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

std::string error_text(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& known) {
    return known.what_without_backtrace();  // its text alone is asked for
  } catch (const std::exception& other) {
    return other.what();  // the same
  } catch (...) {
    return "an exception of an unknown type";  // the same
  }
}

double rate(const AdaptOptions& options, const Attempt& attempt, std::int64_t done) {
  const bool timed = options.objective == Objective::throughput && attempt.seconds > 0;
  return timed ? static_cast<double>(done) / attempt.seconds : 0.0;
}

double rate(const AdaptOptions& options, const Attempt& attempt, const MaximizeCall& call) {
  const std::int64_t done = call.counts_items ? attempt.size() : kOne;
  return rate(options, attempt, call.items > 0 ? call.items : done);
}

bool cannot_repeat(const AdaptOptions& options) {
  return options.ranks != nullptr && options.ranks->options().collectives == Collectives::inside;
}

void give_up_inside(const Failure& failure) {
  TORCH_CHECK_WITH(OutOfMemoryError, false, failure.message,
                   "\nThe work has collectives inside, in which other ranks may wait for this one: "
                   "it cannot be repeated with a smaller size.");
}

}  // namespace brim::detail
