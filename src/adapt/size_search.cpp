#include <brim/adapt/size_search.h>

#include <algorithm>
#include <ranges>
#include <utility>

#include "adapt/size_lattice.h"
#include "predict/growth.h"

namespace brim {
namespace {

using detail::require;

// Free memory fluctuates: a change below this is none.
constexpr double kClearly = 1.1;
// After this many fits, a call in parts retries a size whose failure was doubtful.
constexpr int kFitsToLift = 3;

void check_size(const Attempt& attempt) {
  const std::int64_t size = attempt.values.empty() ? 0 : attempt.size();
  require(size >= 1, "size", size, "at least 1");
}

bool doubtful(const Attempt& attempt) {
  return !attempt.fitted() && attempt.need() && attempt.available &&
         !detail::explains(attempt, static_cast<double>(*attempt.available));
}

}  // namespace

SizeSearch::SizeSearch(const SizeSearchOptions& options)
    : options_(options), available_(std::max<std::int64_t>(options.available.value_or(-1), -1)) {
  require(options.lower >= 1, "lower", options.lower, "at least 1");
  require(options.upper >= options.lower, "upper", options.upper, "at least lower");
  require(options.quantum >= 1, "quantum", options.quantum, "at least 1");
  require(options.margin >= 0.0 && options.margin <= 0.5, "margin", options.margin, "in [0, 0.5]");
  choose();
}

std::optional<std::int64_t> SizeSearch::best() const noexcept {
  return best_ == 0 ? std::nullopt : std::optional(best_);
}

std::optional<std::int64_t> SizeSearch::smallest_failure() const noexcept {
  return failure_ == 0 ? std::nullopt : std::optional(failure_);
}

void SizeSearch::remember(const Attempt& attempt) { remember(std::span(&attempt, 1)); }

void SizeSearch::remember(std::span<const Attempt> attempts) {
  for (const Attempt& attempt : attempts) {
    check_size(attempt);
    add(attempt, true);
  }
  update_bounds();
  choose();
}

void SizeSearch::record(const Attempt& attempt) {
  check_size(attempt);
  const auto left = [&] {
    return (failure_ == 0 ? options_.upper : failure_ - 1) - std::max(best_, options_.lower - 1);
  };
  const std::int64_t before = left();
  const std::int64_t previous = known_.empty() ? 0 : known_.back().size();
  expect_available(attempt);
  add(attempt, false);
  grown_ += attempt.size() > previous ? 1 : 0;
  ++(attempt.fitted() ? fits_ : failures_);
  fits_in_a_row_ = attempt.fitted() ? fits_in_a_row_ + 1 : 0;
  doubtful_failures_ += doubtful(attempt) ? 1 : 0;
  update_bounds();
  stalls_ = left() > before / 2 ? stalls_ + 1 : 0;
  choose();
}

void SizeSearch::expect_available(const Attempt& attempt) noexcept {
  if (attempt.available.value_or(-1) < 0) {
    return;
  }
  available_ = *attempt.available;
  if (known_.empty()) {
    return;
  }
  const Attempt& previous = known_.back();
  const std::int64_t then = previous.available.value_or(-1);
  if (attempt.fitted() && previous.fitted() && !previous.remembered && then > available_) {
    // The available bytes were read before the attempt. What it left behind is not known yet, so
    // assume as much per size as the attempt before it left.
    const double left = static_cast<double>(then - available_) /
                        static_cast<double>(previous.size()) * static_cast<double>(attempt.size());
    available_ -= static_cast<std::int64_t>(std::min(left, static_cast<double>(available_) / 2));
  }
}

void SizeSearch::add(const Attempt& attempt, bool remembered) {
  auto place = std::find_if(known_.begin(), known_.end(), [&](const Attempt& a) {
    return a.size() == attempt.size() && a.fitted() == attempt.fitted();
  });
  if (place == known_.end() && known_.size() == kMostKnown) {
    // Drop the oldest, but never one that is a bound now.
    place = std::find_if(known_.begin(), known_.end(), [&](const Attempt& a) {
      return a.size() != best_ && a.size() != failure_;
    });
  }
  if (place == known_.end()) {
    known_.push_back(attempt);
  } else {
    std::rotate(place, place + 1, known_.end());
    auto record = known_.back().size() == attempt.size() ? known_.back().record : nullptr;
    known_.back() = attempt;  // in its memory: most parts of a range repeat a size
    if (!known_.back().record) {
      known_.back().record = std::move(record);
    }
  }
  Attempt& added = known_.back();
  added.remembered = remembered;
  if (added.available < 0) {
    added.available.reset();
  }
  // A fit that held nothing says nothing about growth, except to a probe, which may grow.
  if (added.fitted() && added.peak == 0 && options_.start != Start::probe) {
    added.peak.reset();
  }
}

bool SizeSearch::bounds(const Attempt& attempt) const noexcept {
  const std::int64_t bytes = attempt.need().value_or(-1);
  const bool comparable = attempt.available && available_ >= 0;
  const auto now = static_cast<double>(available_);
  const auto then = static_cast<double>(attempt.available.value_or(0));
  // An attempt without bytes (a kernel's size limit, memory of another device), or a failure that
  // had all the bytes but not in one piece, counts until clearly more or less memory is available.
  const bool explained = bytes >= 0 && (attempt.fitted() || static_cast<double>(bytes) > then);
  const double tolerance = explained ? 1.0 : kClearly;
  if (attempt.fitted()) {
    const bool no_less = comparable ? now * tolerance >= then : bytes < 0;
    // With a known need, slightly less than then is fine as long as it is enough.
    const bool enough =
        comparable && bytes >= 0 && bytes <= available_ && now >= then * (1.0 - options_.margin);
    return no_less || enough ||
           (!attempt.remembered && (bytes < 0 || available_ < 0 || bytes <= available_));
  }
  if (doubtful(attempt)) {
    // Memory that was short for a moment (another thread, a test) must not keep sizes small for
    // good. The next call ignores the failure; a call in parts retries once after some fits.
    const bool lifted =
        options_.start == Start::probe && doubtful_failures_ == 1 && fits_in_a_row_ >= kFitsToLift;
    return !attempt.remembered && !lifted;
  }
  const bool no_more = comparable ? now <= then * tolerance : bytes < 0;
  return !attempt.remembered || no_more || (available_ >= 0 && bytes > available_);
}

void SizeSearch::update_bounds() noexcept {
  const auto grid = detail::lattice(options_);
  best_ = 0;
  failure_ = 0;
  failed_here_ = false;
  // Newest first: what contradicts a newer attempt is out of date.
  for (const Attempt& attempt : std::views::reverse(known_)) {
    if (!bounds(attempt)) {
      continue;
    }
    if (attempt.fitted()) {
      const std::int64_t size = grid.floor(attempt.size());
      if (failure_ == 0 || size < failure_) {
        best_ = std::max(best_, size);
      }
    } else if (attempt.size() > best_ && attempt.size() <= options_.upper &&
               (failure_ == 0 || attempt.size() < failure_)) {
      failure_ = attempt.size();
      failed_here_ = !attempt.remembered;
    }
  }
}

}  // namespace brim
