// How a SizeSearch chooses its next size, from the bounds that size_search.cpp keeps and from what
// the model of the need (predict/growth.h) expects.

#include <brim/adapt/size_search.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>

#include "adapt/size_lattice.h"
#include "bisect.h"
#include "predict/growth.h"
#include "predict/parts_need.h"
#include "predict/recorded_growth.h"

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

// What CUDA's allocator takes from the device at once for tensors below 10 MiB: as much may be out
// of reach at the end. Of little memory, no more than this share.
constexpr double kSegment = 20.0 * (1 << 20);
constexpr double kLargestSegmentShare = 1.0 / 16;
// Work whose gaps took more than this share of its need has blocks that do not fit into each other.
// In a model of CUDA's allocator such work ran out of memory at 86 to 99 % of the bytes.
constexpr double kHasGaps = 0.03;
constexpr double kShareOfGaps = 0.08;
// A failure that the bytes do not explain is not approached any closer than this.
constexpr double kNearFailure = 0.92;
// With a single fit, a smaller step up than this shows too little. Then a smaller size is tried, so
// much smaller, but never a single item: batch normalization refuses that.
constexpr double kWorthLearning = 1.03;
constexpr double kLearningShare = 15.0 / 16;
constexpr std::int64_t kLeastToLearnFrom = 2;

// Parts of the options' margin. The first jump is optimistic anyway, and near a size that fitted
// there is little left to be wrong about.
constexpr double kSmallMargin = 1.0 / 4;

// A calculated size this close to one that halving tries is not worth a failure of its own.
constexpr double kBetterThanHalving = 1.02;

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

/// What of the available bytes can be used; negative: not known.
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

/// What a prediction leaves free of `bytes`.
double SizeSearch::held_back(double bytes, double used, double margin) const {
  if (options_.start == Start::probe) {
    return margin * bytes;
  }
  if (options_.packs) {
    return margin * (used < bytes ? bytes - used : bytes);
  }
  const bool gaps = std::ranges::any_of(known_, [](const Attempt& attempt) {
    return static_cast<double>(attempt.unused) >
           kHasGaps * static_cast<double>(attempt.need().value_or(0));
  });
  return std::max((gaps ? kShareOfGaps : options_.margin) * bytes,
                  std::min(kSegment, kLargestSegmentShare * bytes));
}

std::optional<SizeSearch::Prediction> SizeSearch::predicted(const Growth& growth,
                                                            double margin) const {
  const Attempt* fit = growth.largest_fit();
  double bytes = usable();
  if (fit == nullptr || bytes < 0) {
    return std::nullopt;
  }
  bytes -= held_back(bytes, static_cast<double>(*fit->need()), margin);
  const bool probing = options_.start == Start::probe;
  const auto [size, confirmed] = growth.largest_within(bytes, !probing);
  if (confirmed || !probing) {
    return Prediction{size, confirmed};
  }
  const double most = kProbeGrowth * static_cast<double>(fit->size());
  // Between tiny sizes, or where most of the need is constant, the cautious prediction may allow no
  // step. To stay there would cost more, for good, than the one failure that this risks.
  const bool early = growth.fits() < 3 && best_ > 0 && failure_ == 0;
  const double least = early ? static_cast<double>(lattice(options_).above(best_)) : 0.0;
  return Prediction{std::max(std::min(size, most), least), false};
}

/// Whether the smallest failure had all the bytes that it asked for, but not in one piece.
bool SizeSearch::failed_with_room() const {
  return std::ranges::any_of(known_, [&](const Attempt& attempt) {
    return !attempt.fitted() && attempt.size() == failure_ && attempt.need() &&
           *attempt.need() <= available_;
  });
}

/// The newest fit if its requests are known, else null.
const Attempt* SizeSearch::last_recorded() const noexcept {
  const auto last = std::find_if(known_.rbegin(), known_.rend(), std::mem_fn(&Attempt::fitted));
  return last != known_.rend() && last->record ? &*last : nullptr;
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
    const Growth growth(known_);
    if (const auto recorded = recorded_choice(growth, high)) {
      return *recorded;
    }
    if (const auto size = recorded_size(options_.margin * kSmallMargin, high)) {
      return moved_to(static_cast<double>(*size), high);
    }
    const auto expected = predicted(growth, options_.margin * kSmallMargin);
    const bool guess = growth.fits() == 1 && expected && !expected->confirmed;
    // A single fit that nothing has failed beside says little about far larger sizes.
    const bool hopes = guess && !options_.cautious;
    if (expected && !(hopes && std::ranges::all_of(known_, &Attempt::fitted))) {
      const double most = std::floor(std::min(expected->size, 2.0 * static_cast<double>(high)));
      const std::int64_t size = moved_to(detail::less_spared(most), high);
      const bool stays =
          static_cast<double>(size) < kWorthLearning * static_cast<double>(best_) ||
          std::ranges::any_of(
              known_,
              [&](const Attempt& attempt) { return attempt.fitted() && attempt.size() == size; });
      return stays ? learning_size(growth, size, expected->confirmed).value_or(size) : size;
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

/// From what fitted before to a size that is expected to fit.
std::int64_t SizeSearch::moved_to(double size, std::int64_t high) const {
  if (failure_ != 0 && (size >= static_cast<double>(failure_) || failed_with_room())) {
    // The model does not see why that failed: gaps, or a need in steps.
    size = std::min(size, kNearFailure * static_cast<double>(failure_));
  }
  // A failure would cost the whole call: what fitted before is not left for the last percent.
  const bool worth_it = size >= (1 + kWorthMoving) * static_cast<double>(best_);
  return best_ > 0 && !worth_it ? best_ : clamp(size, std::max(best_, options_.lower), high);
}

/// A size slightly smaller than `size` that shows, without a failure, how the need grows, where the
/// fits leave no room to find that out upwards; unless failures show that there is nothing to gain.
/// A single fit leaves none, and where requests are recorded, nor do fits of other work (before an
/// optimizer had its state): two sizes close to each other show what each request does.
std::optional<std::int64_t> SizeSearch::learning_size(const Growth& growth, std::int64_t size,
                                                      bool confirmed) const {
  const auto known = static_cast<double>(size);
  const std::int64_t least = std::min(std::max(options_.lower, kLeastToLearnFrom), size);
  const std::int64_t less = clamp(kLearningShare * known, least, size);
  const auto is_learned = [&](const Attempt& attempt) {
    return attempt.fitted() && less <= attempt.size() && attempt.size() < size;
  };
  bool useful = growth.fits() == 1 && !confirmed;
  if (options_.packs && last_recorded() != nullptr) {
    const bool between_fits = growth.largest_fit()->size() > lattice(options_).above(size);
    useful = (between_fits || !confirmed) && std::ranges::none_of(known_, is_learned);
  }
  return useful && growth.ceiling(usable()) > kWorthLearning * known ? std::optional(less)
                                                                     : std::nullopt;
}

/// Where blocks pack: what records of two sizes show. Unlike peaks, they show how each phase of the
/// work grows, also one that has not been the largest yet.
std::optional<std::int64_t> SizeSearch::recorded_size(double margin, std::int64_t high) const {
  const Attempt* last = last_recorded();
  double bytes = usable();
  if (!options_.packs || bytes < 0 || last == nullptr || !last->need()) {
    return std::nullopt;
  }
  bytes -= held_back(bytes, static_cast<double>(*last->need()), margin);
  const auto size = last->record->chosen(high, bytes, [&]() -> std::optional<std::int64_t> {
    const auto records = *detail::RecordedGrowth::of(known_);
    // Other threads may have been recorded too.
    const auto need = static_cast<double>(*last->need());
    if (!detail::alike(records.need_at(records.size()), need)) {
      return std::nullopt;
    }
    if (failure_ != 0 && records.need_at(static_cast<double>(failure_)) <= bytes) {
      return std::nullopt;  // they do not show why that failed
    }
    const std::int64_t most = high + high / 64;  // of which a little is held back
    for (const Attempt& other : known_) {
      if (other.fitted() && other.record && other.size() != last->size()) {
        const auto parts =
            detail::PartsNeed::of(*last->record, last->size(), *other.record, other.size());
        if (parts) {
          return parts->largest_within(bytes, most);
        }
      }
    }
    // Sizes that are padded to the same show nothing.
    if (!records.knows_growth() || records.need_at(2 * records.size()) == need) {
      return std::nullopt;
    }
    return detail::less_spared(records.largest_within(bytes, most));
  });
  return size.value_or(0) == 0 ? std::nullopt : size;
}

/// Where blocks do not pack: the largest size whose requests the allocator can serve from now on,
/// as far as records of other sizes show.
std::optional<std::int64_t> SizeSearch::recorded_choice(const Growth& growth,
                                                        std::int64_t high) const {
  const double bytes = usable();
  const Attempt* last = last_recorded();
  const bool possible = !options_.packs && options_.allocator && bytes >= 0;
  if (!possible || last == nullptr || growth.largest_fit() == nullptr) {
    return std::nullopt;
  }
  return last->record->chosen(high, bytes, [&] { return replayed_choice(growth, bytes, high); });
}

std::optional<std::int64_t> SizeSearch::replayed_choice(const Growth& growth, double bytes,
                                                        std::int64_t high) const {
  auto now = options_.allocator();
  if (!now) {
    return std::nullopt;
  }
  auto records = *detail::RecordedGrowth::of(known_);
  const auto used = static_cast<double>(*growth.largest_fit()->need());
  const bool guess = !records.knows_growth();
  const double kept = guess ? options_.margin * std::max(bytes - used, 0.0) : 0.0;
  const auto spared = static_cast<std::int64_t>(static_cast<double>(available_) - bytes + kept);
  now->set_capacity(std::max<std::int64_t>(now->options().capacity - spared, 0));
  if (!records.begin_from(*now)) {
    return best_ > 0 ? std::optional(best_) : std::nullopt;
  }
  const double last = records.size();
  const auto largest_up_to = [&](double most, std::int64_t least) {
    const double low = std::max(last / 4, static_cast<double>(least) - 1);
    return records.largest_between(low, std::min(most, static_cast<double>(high)));
  };
  auto most = static_cast<double>(high);
  if (guess) {
    most = std::min(most, growth.largest_within(bytes - kept, true).size);
  } else if (failure_ != 0 && records.fits(static_cast<double>(failure_))) {
    // The replay does not see why that failed.
    most = std::min(most, kNearFailure * static_cast<double>(failure_));
  }
  double size = records.largest_between((1 + kWorthMoving) * last, most);
  if (growth.fits() == 1 && size < kWorthLearning * last &&
      growth.ceiling(bytes) > kWorthLearning * last) {
    size = largest_up_to(kLearningShare * last, std::max(options_.lower, kLeastToLearnFrom));
  }
  if (size == 0 && last <= static_cast<double>(high) && records.fits(last)) {
    size = last;
  }
  if (size == 0) {
    size = largest_up_to(std::min(last, most), options_.lower);
  }
  return size == 0 ? std::nullopt : std::optional(clamp(size, options_.lower, high));
}

/// Never worse than halving. It tries the sizes that halving would, without those that cannot fit.
/// In between it tries what it calculates, as long as it has failed no more often than halving
/// would have until there: so it fails at most once more than halving, and ends no lower.
std::int64_t SizeSearch::shrink_choice(std::int64_t high) const {
  const double bytes = usable();
  const auto ceiling = bytes < 0 ? std::nullopt : Growth(known_).below_failure(failure_, bytes);
  const double guess = ceiling ? ceiling->guess * (1.0 - options_.margin) : 0.0;
  // The bytes are rounded: what is hardly larger may fit.
  const double largest =
      ceiling ? ceiling->size * (1.0 + options_.margin) : static_cast<double>(failure_);
  std::int64_t above_guess = 0;  // sizes that halving tries
  std::int64_t half = options_.upper;
  while (half > options_.lower && (half >= failure_ || static_cast<double>(half) > largest)) {
    above_guess += static_cast<double>(half) > guess ? 1 : 0;
    half = std::max(options_.lower, floor_to_multiple(half / 2, options_.quantum));
  }
  const bool better = guess > kBetterThanHalving * static_cast<double>(half);
  const bool affordable = failures_ <= above_guess;
  return clamp(better && affordable ? guess : static_cast<double>(half), options_.lower, high);
}

std::int64_t SizeSearch::narrow_choice(std::int64_t high) const {
  // Two guesses may miss, then the middle halves what is left: at most three times the attempts of
  // bisecting.
  if (stalls_ >= 2) {
    return middle(high);
  }
  // What fitted earlier is the surer choice, unless halving would end higher.
  if (fits_ == 0) {
    return best_ >= failure_ / 2 ? best_ : std::max(best_, shrink_choice(high));
  }
  // A guess at or below the best is answered by the step above it, which either fails, and the
  // search is over, or shows that there is more.
  const auto guess = predicted(Growth(known_), 0.0);
  return guess ? clamp(guess->size, lattice(options_).above(best_), high) : middle(high);
}

std::int64_t SizeSearch::probe_choice(std::int64_t high) const {
  const Growth growth(known_);
  auto expected = predicted(growth, options_.margin);
  if (expected && best_ > 0 && expected->size <= kNearby * static_cast<double>(best_)) {
    expected = predicted(growth, options_.margin * kSmallMargin);
  }
  const bool blind = !expected;
  if (best_ == 0 && failed_here_) {
    const std::int64_t smaller = shrink_choice(high);
    return blind ? smaller : std::min(smaller, clamp(expected->size, options_.lower, high));
  }
  if (blind && best_ == 0) {
    const std::int64_t start = hint();
    return start > 0
               ? start
               : clamp(static_cast<double>(options_.upper) / kProbeShare, options_.lower, high);
  }
  double target = blind ? 2.0 * static_cast<double>(best_) : expected->size;
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
