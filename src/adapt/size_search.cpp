#include <brim/adapt/size_search.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "adapt/size_lattice.h"

namespace brim {
namespace {

constexpr double kClearly = 1.1;
constexpr double kDoubtful = 0.5;
constexpr int kFitsToLift = 3;

void require(bool condition, const char* name, const std::string& value, const char* allowed) {
  if (!condition) {
    throw std::invalid_argument(std::string(name) + "=" + value + " is not allowed; it must be " +
                                allowed);
  }
}

std::int64_t known(const std::optional<std::int64_t>& bytes) {
  return bytes && *bytes >= 0 ? *bytes : -1;
}

std::int64_t saturating_sum(std::int64_t a, std::int64_t b) {
  return a > std::numeric_limits<std::int64_t>::max() - b ? std::numeric_limits<std::int64_t>::max()
                                                          : a + b;
}

}  // namespace

SizeSearch::SizeSearch(const SizeSearchOptions& options)
    : options_(options), available_(known(options.available)) {
  require(options.lower >= 1, "lower", std::to_string(options.lower), "at least 1");
  require(options.upper >= options.lower, "upper", std::to_string(options.upper), "at least lower");
  require(options.quantum >= 1, "quantum", std::to_string(options.quantum), "at least 1");
  require(options.margin >= 0.0 && options.margin <= 0.5, "margin", std::to_string(options.margin),
          "in [0, 0.5]");
  choose();
}

std::optional<std::int64_t> SizeSearch::best() const noexcept {
  return best_ == 0 ? std::nullopt : std::optional(best_);
}

std::optional<std::int64_t> SizeSearch::smallest_failure() const noexcept {
  return failure_ == 0 ? std::nullopt : std::optional(failure_);
}

void SizeSearch::remember(const SizeOutcome& outcome) { remember(std::span(&outcome, 1)); }

void SizeSearch::remember(std::span<const SizeOutcome> outcomes) {
  for (const SizeOutcome& outcome : outcomes) {
    add(outcome, true);
  }
  update_bounds();
  choose();
}

void SizeSearch::record(const SizeOutcome& outcome) {
  const auto left = [&] {
    return (failure_ == 0 ? options_.upper : failure_ - 1) - std::max(best_, options_.lower - 1);
  };
  const std::int64_t before = left();
  const Fact previous = count_ > 0 ? facts_[count_ - 1] : Fact{};
  add(outcome, false);
  expect_available(previous);
  grown_ += outcome.size > previous.size ? 1 : 0;
  ++(outcome.fitted ? fits_ : failures_);
  failed_in_a_row_ = outcome.fitted ? 0 : failed_in_a_row_ + 1;
  fits_in_a_row_ = outcome.fitted ? fits_in_a_row_ + 1 : 0;
  doubtful_failures_ += facts_[count_ - 1].doubtful ? 1 : 0;
  update_bounds();
  stalls_ = left() > before / 2 ? stalls_ + 1 : 0;
  choose();
}

void SizeSearch::set_available(std::int64_t bytes) {
  require(bytes >= 0, "available", std::to_string(bytes), "at least 0");
  available_ = bytes;
  update_bounds();
  choose();
}

void SizeSearch::expect_available(const Fact& previous) noexcept {
  const Fact& last = facts_[count_ - 1];
  if (last.available < 0) {
    return;
  }
  available_ = last.available;
  if (last.fitted && previous.fitted && !previous.remembered &&
      previous.available > last.available) {
    // Held was read before the attempt. What it left behind is not known yet, but what the one
    // before it did, is.
    const double left = static_cast<double>(previous.available - last.available) /
                        static_cast<double>(previous.size) * static_cast<double>(last.size);
    available_ -= static_cast<std::int64_t>(std::min(left, static_cast<double>(available_) / 2));
  }
}

void SizeSearch::add(const SizeOutcome& outcome, bool remembered) {
  require(outcome.size >= 1, "size", std::to_string(outcome.size), "at least 1");
  Fact fact{.size = outcome.size, .fitted = outcome.fitted, .remembered = remembered};
  const std::int64_t peak = known(outcome.peak);
  fact.requested = known(outcome.requested);
  if (outcome.fitted) {
    // Work that is seen to hold nothing says nothing of its growth; in small parts it may go on.
    fact.need = peak > 0 || options_.start == Start::probe ? peak : -1;
  } else if (peak >= 0 && fact.requested >= 0) {
    fact.need = saturating_sum(peak, fact.requested);
  }
  if (const std::int64_t limit = known(outcome.limit); limit >= 0 && outcome.held >= 0) {
    fact.available = std::max<std::int64_t>(limit - outcome.held, 0);
  }
  fact.doubtful = !fact.fitted && fact.need >= 0 &&
                  static_cast<double>(fact.need) < kDoubtful * static_cast<double>(fact.available);
  const auto end = facts_.begin() + static_cast<std::ptrdiff_t>(count_);
  auto drop = std::find_if(facts_.begin(), end, [&](const Fact& f) {
    return f.size == fact.size && f.fitted == fact.fitted;
  });
  if (drop == end && count_ == kFacts) {
    // The oldest goes, but never one that is a bound now.
    drop = std::find_if(facts_.begin(), end,
                        [&](const Fact& f) { return f.size != best_ && f.size != failure_; });
  }
  if (drop != end) {
    std::move(drop + 1, end, drop);
    --count_;
  }
  facts_[count_++] = fact;
}

bool SizeSearch::bounds(const Fact& fact) const noexcept {
  const bool comparable = fact.available >= 0 && available_ >= 0;
  // A fact without figures (a kernel's size limit, memory of another device) stays true until there
  // is clearly more or less room: what is free moves by a little all the time.
  const double tolerance = fact.need < 0 ? kClearly : 1.0;
  const auto now = static_cast<double>(available_);
  const auto then = static_cast<double>(fact.available);
  if (fact.fitted) {
    const bool no_less = comparable ? now * tolerance >= then : fact.need < 0;
    // With a known need, a little less than then is no matter as long as it is enough.
    const bool enough = comparable && fact.need >= 0 && fact.need <= available_ &&
                        now >= then * (1.0 - options_.margin);
    return no_less || enough ||
           (!fact.remembered && (fact.need < 0 || available_ < 0 || fact.need <= available_));
  }
  if (fact.doubtful) {
    // Memory that was short for a moment (another thread, a test) shall not keep sizes small for
    // good. The next call forgets it; parts of one call try once more after some fits.
    const bool lifted =
        options_.start == Start::probe && doubtful_failures_ == 1 && fits_in_a_row_ >= kFitsToLift;
    return !fact.remembered && !lifted;
  }
  const bool no_more = comparable ? now <= then * tolerance : fact.need < 0;
  return !fact.remembered || no_more || (available_ >= 0 && fact.need > available_);
}

void SizeSearch::update_bounds() noexcept {
  const auto grid = detail::lattice(options_);
  best_ = 0;
  failure_ = 0;
  failed_here_ = false;
  for (std::size_t i = count_;
       i-- > 0;) {  // newest first: what contradicts a newer fact is out of date
    const Fact& fact = facts_[i];
    if (!bounds(fact)) {
      continue;
    }
    if (fact.fitted) {
      const std::int64_t size = grid.floor(fact.size);
      if (failure_ == 0 || size < failure_) {
        best_ = std::max(best_, size);
      }
    } else if (fact.size > best_ && fact.size <= options_.upper &&
               (failure_ == 0 || fact.size < failure_)) {
      failure_ = fact.size;
      failed_here_ = !fact.remembered;
    }
  }
}

}  // namespace brim
