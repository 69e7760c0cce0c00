#include <brim/need/size_search.h>

#include <algorithm>
#include <cmath>
#include <ranges>
#include <utility>

#include "need/need.h"
#include "need/search_constants.h"
#include "need/size_lattice.h"

namespace brim {
namespace {

using detail::require;

void check_size(const Attempt& attempt) {
  const std::int64_t size = attempt.values.empty() ? 0 : attempt.size();
  require(size >= 1, "size", size, "at least 1");
}

/// Whether a failure's bytes do not explain it: something else held memory for a moment.
bool doubtful(const Attempt& attempt) {
  return !attempt.fitted() && attempt.need() && attempt.available &&
         static_cast<double>(*attempt.need()) <
             search::kExplained * static_cast<double>(*attempt.available);
}

}  // namespace

SizeSearch::SizeSearch(const SizeSearchOptions& options)
    : options_(options),
      available_(std::max<std::int64_t>(options.circumstances.available.value_or(-1), -1)) {
  require(options.lower >= 1, "lower", options.lower, "at least 1");
  require(options.upper >= options.lower, "upper", options.upper, "at least lower");
  require(options.quantum >= 1, "quantum", options.quantum, "at least 1");
  const double margin = options.circumstances.margin;
  require(margin >= 0.0 && margin <= 0.5, "margin", margin, "in [0, 0.5]");
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
    if (attempt.trace && attempt.trace->foreseen) {
      foreseen_.push_back(attempt);
    } else {
      add(attempt, true);
    }
  }
  update_bounds();
  choose();
}

/// Traces are far apart at first: of these, in orders of magnitude, and without a failure whatever
/// a fit is multiplied by.
double SizeSearch::left_to_search() const noexcept {
  const auto low = static_cast<double>(std::max(best_, options_.lower - 1));
  const auto high = static_cast<double>(failure_ == 0 ? options_.upper : failure_ - 1);
  if (options_.start != Start::traced) {
    return high - low;
  }
  constexpr double kUnbounded = 1e30;
  return failure_ == 0 ? kUnbounded / std::max(low, 1.0)
                       : std::log((high + 1) / std::max(low, 1.0));
}

void SizeSearch::record(const Attempt& attempt) {
  check_size(attempt);
  const double before = left_to_search();
  const std::int64_t previous = known_.empty() ? 0 : known_.back().size();
  const bool tells = attempt.available.value_or(-1) >= 0;
  available_ = tells ? *attempt.available : available_;
  if (!attempt.fitted() && need_ != nullptr && need_->recorded() &&
      need_->upper(static_cast<double>(attempt.size())) <= usable()) {
    ++missed_;
  }
  available_ = tells ? std::max<std::int64_t>(available_ - attempt.left, 0) : available_;
  add(attempt, false);
  first_ = attempts() == 0 ? attempt.size() : first_;
  grown_ += attempt.size() > previous ? 1 : 0;
  ++(attempt.fitted() ? fits_ : failures_);
  fits_in_a_row_ = attempt.fitted() ? fits_in_a_row_ + 1 : 0;
  doubtful_failures_ += doubtful(attempt) ? 1 : 0;
  // Most parts of a range repeat a size that still fits. The first may be of another kind than
  // those that are remembered.
  const bool settled =
      fits_ > 1 && best_ == next_ && attempt.fitted() && attempt.size() == next_ && attempt.peak &&
      static_cast<double>(*attempt.peak) <= usable() &&
      static_cast<double>(available_) <= search::kClearly * static_cast<double>(chosen_for_);
  if (settled) {
    return;
  }
  update_bounds();
  stalls_ = left_to_search() > before / 2 ? stalls_ + 1 : 0;
  choose();
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
    auto trace = known_.back().size() == attempt.size() ? known_.back().trace : nullptr;
    known_.back() = attempt;  // in its memory: most parts of a range repeat a size
    if (!known_.back().trace) {
      known_.back().trace = std::move(trace);
    }
  }
  Attempt& added = known_.back();
  added.remembered = remembered;
  if (added.available < 0) {
    added.available.reset();
  }
}

bool SizeSearch::bounds(const Attempt& attempt) const {
  const bool has_bytes = attempt.need().has_value();
  const std::int64_t bytes = attempt.need().value_or(0);
  const bool comparable = attempt.available && available_ >= 0;
  const auto now = static_cast<double>(available_);
  const auto then = static_cast<double>(attempt.available.value_or(0));
  // One without bytes (a kernel's size limit, memory of another device), or a failure that had all
  // the bytes but not in one piece, counts until clearly more or less memory is available.
  const bool explained = has_bytes && (attempt.fitted() || static_cast<double>(bytes) > then);
  const double same = explained ? search::kSameBytes : search::kClearly;
  if (attempt.fitted() && has_bytes && static_cast<double>(bytes) <= room()) {
    return true;
  }
  if (attempt.fitted() && attempt.remembered && available_ >= 0 && is_trusted() &&
      need_->recorded()) {
    return need_->upper(static_cast<double>(attempt.size())) <= room();
  }
  if (attempt.fitted()) {
    // What it left itself is not missing: the next call replaces it. The results of parts stay.
    const bool replaces = options_.start != Start::probe;
    const double with_left =
        now + (replaces ? std::max(static_cast<double>(attempt.left), 0.0) : 0.0);
    const bool holds = comparable ? with_left * same >= then : !has_bytes;
    return holds || (!attempt.remembered && (!has_bytes || available_ < 0 || bytes <= available_));
  }
  if (doubtful(attempt)) {
    // Memory that was short for a moment (another thread, a test) must not keep sizes small for
    // good. The next call ignores the failure; a call in parts retries once after some fits.
    const bool lifted = options_.start == Start::probe && doubtful_failures_ == 1 &&
                        fits_in_a_row_ >= search::kFitsToLift;
    return !attempt.remembered && !lifted;
  }
  const bool no_more = comparable ? now <= then * same : !has_bytes;
  return !attempt.remembered || no_more || (available_ >= 0 && bytes > available_);
}

void SizeSearch::update_bounds() {
  const auto grid = detail::lattice(options_);
  std::vector<Attempt> all = foreseen_;
  if (!all.empty()) {
    all.insert(all.end(), known_.begin(), known_.end());
  }
  auto need = Need::of_fits(all.empty() ? known_ : all, options_.circumstances.in_use,
                            available_ < 0 ? std::nullopt : std::optional(available_));
  need_ = need ? std::make_shared<const Need>(*std::move(need)) : nullptr;
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
