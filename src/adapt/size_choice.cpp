// How a SizeSearch chooses its next size, from the bounds that size_search.cpp keeps and from what
// the model of the need (predict/growth.h) expects.

#include <brim/adapt/size_search.h>

#include <algorithm>
#include <array>
#include <bit>

#include "adapt/size_lattice.h"
#include "predict/growth.h"

namespace brim {
namespace {

using detail::Growth;
using detail::lattice;

// The first probe is this part of the upper bound, and until the growth is confirmed each next one
// is at most so much larger.
constexpr double kProbeShare = 64;
constexpr double kProbeGrowth = 16;
// A prediction this close to a fit needs less margin.
constexpr double kNearby = 1.25;
// A gain below this is not worth another size (the allocator would need new segments for it), nor
// one below the second after many moves, which bounds their number.
constexpr double kWorthMoving = 1.0 / 200;
constexpr double kWorthMovingLate = 1.0 / 8;
// Below this use of the available bytes, one step of the lattice is worth a failure.
constexpr double kUnusedForStep = 0.75;

// Parts of the options' margin. The first jump is optimistic anyway, and near a size that fitted
// there is little left to be wrong about. After two failures it must cover what the allocator
// rounds.
constexpr double kSmallMargin = 1.0 / 4;
constexpr double kLaterMargin = 2.0 / 3;

// How much smaller the next size is at least, after so many failures in a row without any fit. The
// first two steps come from the model alone; each that it did not foresee is trusted less, and from
// the fifth on the search bisects.
constexpr std::array<double, 4> kLeastShrink = {0.0, 0.005, 0.02, 0.125};

}  // namespace

void SizeSearch::choose() {
  const std::int64_t high = failure_ == 0 ? options_.upper : lattice(options_).floor(failure_ - 1);
  const bool halving = options_.strategy == Strategy::halving;
  finished_ = high <= best_ || (halving && fits_ > 0 && best_ > 0);
  if (finished_) {
    next_ = best_ > 0 ? best_ : options_.lower;
  } else if (options_.strategy == Strategy::predictive && options_.start == Start::probe) {
    next_ = probe_choice(high);
    finished_ = next_ == best_;
  } else if (attempts() == 0) {
    next_ = first_choice(high);
  } else if (halving) {
    next_ = failure_ == 0 ? high : half();
  } else if (options_.strategy == Strategy::bisect) {
    next_ = middle(high);
  } else {
    next_ = best_ == 0 ? shrink_choice(high) : narrow_choice(high);
  }
}

double SizeSearch::usable() const noexcept {
  auto bytes = static_cast<double>(available_);
  for (const Attempt& attempt : known_) {
    // It failed although there was room by the numbers: fragments, or a limit that promises too
    // much.
    if (!attempt.fitted() && !attempt.remembered && attempt.need() &&
        detail::explains(attempt, static_cast<double>(available_))) {
      bytes = std::min(bytes, static_cast<double>(*attempt.need()));
    }
  }
  return bytes;
}

std::optional<double> SizeSearch::predicted(double margin) const {
  const double bytes = usable() * (1.0 - margin);
  const bool probing = options_.start == Start::probe;
  const Growth growth(known_);
  const auto expected = bytes < 0 ? std::nullopt : growth.largest_within(bytes, probing);
  if (!expected || !probing) {
    return expected ? std::optional(expected->size) : std::nullopt;
  }
  const Attempt& largest = *growth.largest_fit();
  const double most = kProbeGrowth * static_cast<double>(largest.size());
  const double size = expected->confirmed ? expected->size : std::min(expected->size, most);
  // Between tiny sizes even the cautious prediction may allow no step; to stay at a tenth of what
  // fits would cost more, for good, than the one failure that this risks.
  const bool early = !expected->confirmed && growth.fits() < 3 && best_ > 0;
  const bool unused = static_cast<double>(*largest.need()) <= kUnusedForStep * bytes;
  const auto step = static_cast<double>(lattice(options_).above(best_));
  return early && unused ? std::max(size, step) : size;
}

std::int64_t SizeSearch::clamp(double size, std::int64_t low, std::int64_t high) const noexcept {
  if (!(size < static_cast<double>(high))) {
    return high;
  }
  return size <= static_cast<double>(low)
             ? low
             : std::max(low, lattice(options_).floor(static_cast<std::int64_t>(size)));
}

std::int64_t SizeSearch::middle(std::int64_t high) const noexcept {
  const auto grid = lattice(options_);
  const std::int64_t low = std::max(best_, options_.lower - 1);
  const std::int64_t top = failure_ == 0 ? options_.upper : failure_ - 1;
  const std::int64_t half = low + (top - low) / 2 + (top - low) % 2;
  return std::min(std::max(grid.floor(half), grid.above(best_)), high);
}

std::int64_t SizeSearch::half() const noexcept {
  return std::max(options_.lower, floor_to_multiple(failure_ / 2, options_.quantum));
}

std::int64_t SizeSearch::hint() const noexcept {
  std::int64_t fit = 0;
  std::int64_t failure = 0;
  for (const Attempt& attempt : known_) {
    if (attempt.remembered && (!attempt.available || available_ < 0)) {
      if (attempt.fitted()) {
        fit = std::max(fit, attempt.size());
      } else {
        failure = failure == 0 ? attempt.size() : std::min(failure, attempt.size());
      }
    }
  }
  return fit > 0 && failure > fit ? lattice(options_).floor(fit) : 0;
}

std::int64_t SizeSearch::first_choice(std::int64_t high) const {
  if (options_.strategy == Strategy::predictive) {
    if (const auto size = predicted(options_.margin * kSmallMargin)) {
      // A failure would cost the whole call: what fitted before is not left for the last percent.
      const bool worth_it = *size >= (1 + kWorthMoving) * static_cast<double>(best_);
      return best_ > 0 && !worth_it ? best_ : clamp(*size, std::max(best_, options_.lower), high);
    }
    if (best_ == 0 && failure_ != 0) {
      return shrink_choice(high);
    }
  }
  if (failure_ != 0) {
    const bool halving = options_.strategy == Strategy::halving;
    return best_ > 0 ? best_ : halving ? half() : middle(high);
  }
  const std::int64_t size = best_ > 0 ? 0 : hint();
  return size > 0 ? size : high;
}

std::int64_t SizeSearch::shrink_choice(std::int64_t high) const {
  const auto failed = static_cast<std::size_t>(std::max<std::int64_t>(failed_in_a_row_, 1));
  const bool first = std::none_of(known_.begin(), known_.end(), [&](const Attempt& attempt) {
    return !attempt.fitted() && attempt.need() && attempt.size() > failure_;
  });
  const double part = options_.start == Start::probe ? 1.0 : first ? kSmallMargin : kLaterMargin;
  const double bytes = usable() * (1.0 - options_.margin * part);
  const auto expected = bytes < 0 || failed > kLeastShrink.size()
                            ? std::nullopt
                            : Growth(known_).below_failure(failure_, bytes);
  if (!expected) {
    // As halving from the largest size would, so that it ends no lower.
    std::int64_t size = options_.upper;
    while (size >= failure_) {
      size /= 2;
    }
    return clamp(static_cast<double>(size), options_.lower, high);
  }
  double most = static_cast<double>(failure_) * (1.0 - kLeastShrink[failed - 1]);
  if (failed > 2 || (failed == 2 && !expected->confirmed)) {
    // No further behind halving than one failure.
    most = std::min(most, static_cast<double>(options_.upper >> (failed - 1)));
  }
  return clamp(std::min(expected->size, most), options_.lower, high);
}

std::int64_t SizeSearch::narrow_choice(std::int64_t high) const {
  // Two guesses may miss, then the middle halves what is left: at most three times the attempts of
  // bisecting.
  if (stalls_ >= 2) {
    return middle(high);
  }
  const bool only_remembered = fits_ == 0;
  const auto guess = predicted(only_remembered ? options_.margin * kLaterMargin : 0.0);
  if (!guess) {
    // What fitted earlier is the surer choice, unless it was a call that wanted far less.
    return only_remembered && best_ >= high / 8 ? best_ : middle(high);
  }
  // A guess at or below the best is answered by the step above it, which either fails, and the
  // search is over, or shows that there is more. Before anything fitted in this call, what did so
  // earlier is the surer choice.
  const std::int64_t low = only_remembered ? best_ : lattice(options_).above(best_);
  return clamp(*guess, low, high);
}

std::int64_t SizeSearch::probe_choice(std::int64_t high) const {
  auto size = predicted(options_.margin);
  if (size && best_ > 0 && *size <= kNearby * static_cast<double>(best_)) {
    size = predicted(options_.margin * kSmallMargin);
  }
  const bool blind = !size;
  if (best_ == 0 && failed_here_) {
    const std::int64_t smaller = shrink_choice(high);
    return blind ? smaller : std::min(smaller, clamp(*size, options_.lower, high));
  }
  if (blind && best_ == 0) {
    const std::int64_t start = hint();
    return start > 0
               ? start
               : clamp(static_cast<double>(options_.upper) / kProbeShare, options_.lower, high);
  }
  double target = blind ? 2.0 * static_cast<double>(best_) : *size;
  if (failure_ != 0 && best_ > 0 && (failed_here_ || blind)) {
    // The model did not see this failure coming, or there is none. An eighth is not worth a second
    // one.
    if (best_ >= failure_ - failure_ / 8) {
      return best_;
    }
    target = std::min(target, static_cast<double>(middle(high)));
  }
  const std::int64_t choice = clamp(target, options_.lower, high);
  if (best_ == 0 || choice == options_.upper) {
    return choice;
  }
  const auto width =
      static_cast<std::int64_t>(std::bit_width(static_cast<std::uint64_t>(options_.upper)));
  const bool late = grown_ > 12 + 2 * width;
  const double gain = static_cast<double>(choice - best_) / static_cast<double>(best_);
  return gain < (late ? kWorthMovingLate : kWorthMoving) ? best_ : choice;
}

}  // namespace brim
