#include "adapt/detail/part_trials.h"

#include <brim/adapt/call_key.h>
#include <brim/adapt/size_memory.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "memory/backend.h"
#include "memory/reclaim.h"

namespace brim::detail {
namespace {

// Until the time of a size counts. What must go is learned within three steps, and the first run of
// a size allocates anew: the best time of the later ones is that of a settled step.
constexpr std::int64_t kRuns = 4;

// Parts that give nothing up are looked for up to so many times the fewest. With the ones in
// between, the sizes of one search are as many as a SizeMemory keeps of one key.
constexpr std::int64_t kMostTimes = 8;

const Attempt* find_size(std::span<const Attempt> trials, std::int64_t size) {
  const auto found = std::ranges::find(trials, size, &Attempt::size);
  return found == trials.end() ? nullptr : &*found;
}

}  // namespace

std::int64_t choose_part_size(std::span<const Attempt> trials, std::int64_t items,
                              const SizeLattice& allowed) {
  const auto parts = [&](std::int64_t size) { return (items + size - 1) / size; };
  const auto size_of = [&](std::int64_t count) {
    const std::int64_t even = parts(count);  // the longest of so many parts
    return allowed.floor(even) == even ? even : allowed.above(even);
  };
  const auto find = [&](std::int64_t size) { return find_size(trials, size); };

  const std::int64_t fewest = parts(allowed.upper);
  const bool gave_up = std::ranges::any_of(trials, [&](const Attempt& trial) {
    return trial.given_up > 0 && parts(trial.size()) == fewest;
  });
  if (!gave_up || !std::ranges::all_of(trials, &Attempt::fitted)) {
    return allowed.upper;
  }
  const std::int64_t largest = size_of(fewest);
  const Attempt* const with_fewest = find(largest);
  if (with_fewest == nullptr || with_fewest->given_up == 0 || with_fewest->calls < kRuns) {
    return largest;
  }

  std::int64_t pressed = largest;
  std::int64_t free = 0;  // gives nothing up
  while (free == 0) {
    const std::int64_t size = size_of(2 * parts(pressed));
    if (size >= pressed || parts(size) > kMostTimes * fewest) {
      return largest;
    }
    const Attempt* const trial = find(size);
    if (trial == nullptr) {
      return size;
    }
    (trial->given_up > 0 ? pressed : free) = size;
  }
  while (parts(free) - parts(pressed) > std::max<std::int64_t>(parts(pressed) / 4, 1)) {
    const std::int64_t size = size_of((parts(free) + parts(pressed)) / 2);
    if (size <= free || size >= pressed) {
      break;
    }
    const Attempt* const trial = find(size);
    if (trial == nullptr) {
      return size;
    }
    (trial->given_up > 0 ? pressed : free) = size;
  }
  if (find(free)->calls < kRuns) {
    return free;
  }

  const Attempt* best = with_fewest;
  for (const Attempt& trial : trials) {
    const bool counts = trial.size() <= allowed.upper && trial.calls >= kRuns;
    if (counts && trial.rate > best->rate) {
      best = &trial;
    }
  }
  return best->size();
}

PartTrials::PartTrials(const AdaptOptions& options, std::int64_t items, c10::Device device)
    : options_(options), items_(items) {
  if (items == 0 || options.memory == nullptr || options.objective != Objective::memory ||
      bytes_given_up() == 0) {
    return;
  }
  CallKey key(options.key);
  key.add(std::string_view("parts"));
  key.add(items);
  key.add(budget_in_force(c10::DeviceType::CPU).value_or(0));
  key.add(device.is_cpu() ? 0 : budget_in_force(device).value_or(0));
  key_ = key.value();
  trials_ = options.memory->recall(key_);
}

std::int64_t PartTrials::largest(std::span<const Attempt> known, std::int64_t maximum) const {
  std::int64_t result = 0;
  for (const Attempt& trial : trials_) {
    const bool has_failed = std::ranges::any_of(known, [&](const Attempt& attempt) {
      return !attempt.fitted() && attempt.size() <= trial.size();
    });
    if (trial.fitted() && trial.size() <= maximum && !has_failed) {
      result = std::max(result, trial.size());
    }
  }
  return result;
}

std::int64_t PartTrials::choose(const SizeLattice& allowed) const {
  const bool is_whole = allowed.upper >= items_;
  return is_whole && options_.ranks != nullptr ? allowed.upper
                                               : choose_part_size(trials_, items_, allowed);
}

const Attempt* PartTrials::find(std::int64_t size) const { return find_size(trials_, size); }

bool PartTrials::have_ended() const { return !std::ranges::all_of(trials_, &Attempt::fitted); }

bool PartTrials::is_timed(std::int64_t size) const {
  const Attempt* const known = find(size);
  return any() && !have_ended() && (known == nullptr || known->calls < kRuns);
}

void PartTrials::learn(Attempt fit) {
  if (key_ == 0) {
    return;
  }
  const Attempt* const known = find(fit.size());
  const bool gave_up = known != nullptr && known->given_up > 0;
  if (!is_timed(fit.size()) && gave_up == (fit.given_up > 0)) {
    return;
  }
  const bool counts = is_timed(fit.size()) && fit.seconds > 0;
  fit.rate = counts ? static_cast<double>(items_) / fit.seconds : 0;
  fit.rate = std::max(fit.rate, known != nullptr ? known->rate : 0);
  fit.trace.reset();
  options_.memory->learn(key_, fit);
}

bool PartTrials::end_after_error(std::int64_t size) {
  const bool is_smaller = std::ranges::any_of(
      trials_, [&](const Attempt& trial) { return trial.fitted() && trial.size() > size; });
  if (!is_smaller || !is_timed(size)) {
    return false;
  }
  trials_.push_back({.values = {size}, .outcome = OomKind::size_limit});
  options_.memory->learn(key_, trials_.back());
  return true;
}

void wait_for(c10::Device device) {
  if (!device.is_cpu() && accelerator_initialized()) {
    c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
  }
}

}  // namespace brim::detail
