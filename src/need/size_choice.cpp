// How a SizeSearch chooses its next size, from the bracket that size_search.cpp keeps and from what
// the Need says.

#include <brim/need/size_search.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "bisect.h"
#include "need/need.h"
#include "need/request_growth.h"
#include "need/search_constants.h"
#include "need/size_lattice.h"

namespace brim {

using detail::lattice;

void SizeSearch::choose() {
  chosen_for_ = available_;
  expected_need_.reset();
  const std::int64_t high = failure_ == 0 ? options_.upper : lattice(options_).floor(failure_ - 1);
  const bool halving = options_.strategy == Strategy::halving;
  // After a failure, what fitted in earlier calls is one of the guesses.
  const bool shrinks = options_.strategy == Strategy::predictive &&
                       options_.start == Start::at_upper && fits_ == 0 && failures_ > 0;
  finished_ = (high <= best_ && (best_ == 0 || !shrinks)) || (halving && fits_ > 0 && best_ > 0);
  if (finished_) {
    next_ = best_ > 0 ? best_ : options_.lower;
  } else if (options_.strategy == Strategy::predictive && options_.start == Start::probe) {
    next_ = probe_choice(high);
    finished_ = next_ == best_;
  } else if (attempts() == 0) {
    next_ = first_choice(high);
  } else if (options_.start == Start::traced) {
    next_ = traced_choice(high);
  } else if (halving) {
    next_ = failure_ == 0 ? high : half();
  } else if (options_.strategy == Strategy::bisect) {
    next_ = middle(high);
  } else {
    next_ = narrow_choice(high);
  }
}

/// What of the available bytes may be used; negative: not known.
double SizeSearch::room() const noexcept {
  return static_cast<double>(available_) * (1 - options_.circumstances.margin);
}

/// What of them is counted on at another size than the last.
double SizeSearch::usable() const noexcept {
  const auto bytes = static_cast<double>(available_);
  const Circumstances& now = options_.circumstances;
  if (options_.start == Start::traced) {
    return bytes;
  }
  const double segment =
      now.packs ? 0.0 : std::min(search::kSegment, search::kLargestSegmentShare * bytes);
  const bool in_parts = options_.start == Start::probe;
  const bool foreseen = need_ != nullptr && need_->foreseen();
  const double margin = std::max({now.margin, in_parts ? search::kProbeMargin : 0.0,
                                  foreseen ? search::kForeseenMargin : 0.0});
  return bytes < 0 ? bytes : bytes - std::max(segment, margin * bytes);
}

const Attempt* SizeSearch::last_fit() const noexcept {
  const auto last = std::find_if(known_.rbegin(), known_.rend(), std::mem_fn(&Attempt::fitted));
  return last == known_.rend() ? nullptr : &*last;
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

/// Whether the need is followed. Else only the bracket counts.
bool SizeSearch::is_trusted() const {
  return need_ != nullptr && unforeseen() < search::kMostUnforeseen;
}

/// The number of known failures at sizes that were expected to fit, in circumstances that hold.
std::int64_t SizeSearch::unforeseen() const {
  return std::ranges::count_if(
      known_, [&](const Attempt& attempt) { return attempt.expected && bounds(attempt); });
}

/// The largest size up to `most` that is expected to fit; 0 if none is.
std::int64_t SizeSearch::largest_expected(const Need& need, std::int64_t most, double power) const {
  const double bytes = usable();
  const auto in_bytes = [&](std::int64_t size) {
    return need.upper(static_cast<double>(size), power) <= bytes;
  };
  std::int64_t size = detail::largest_up_to(0, most, in_bytes);
  const Circumstances& now = options_.circumstances;
  if (now.packs || !need.recorded() || !now.allocator || size == 0) {
    return size;
  }
  auto device = now.allocator();
  if (!device) {
    return size;
  }
  device->set_capacity(
      std::max<std::int64_t>(device->options().capacity -
                                 static_cast<std::int64_t>(static_cast<double>(available_) - bytes),
                             0));
  const auto fits = [&](std::int64_t each) {
    return need.fits(static_cast<double>(each), *device, power, options_.start == Start::traced);
  };
  // Some sizes fit between others that do not.
  const std::int64_t spared = detail::largest_with_headroom(0, size, fits);
  return options_.start == Start::traced
             ? detail::largest_up_to(spared, std::min(size, spared + spared / 64), fits)
             : spared;
}

/// From what is known of earlier calls; empty if that is nothing.
std::optional<std::int64_t> SizeSearch::known_choice(std::int64_t high) {
  const Attempt* last = last_fit();
  if (last == nullptr || available_ < 0) {
    return std::nullopt;
  }
  const Need* need = need_.get();
  if (need == nullptr) {
    return std::nullopt;
  }
  const std::int64_t size = std::max(lattice(options_).floor(last->size()), options_.lower);
  const bool known = need->is_mostly_known();
  if (need->known() == 0 && !options_.cautious && foreseen_.empty() &&
      std::ranges::all_of(known_, &Attempt::fitted)) {
    return std::nullopt;  // a single size that nothing has failed beside says little about others
  }
  // Most needs grow in proportion at most. If this one does not, the failure shows it.
  const double power = need->known() == 0 ? options_.power : Need::kSquare;
  const bool may_fit = size <= high && need->lower(static_cast<double>(size)) <= room();
  std::int64_t choice = 0;
  if (is_trusted()) {
    const bool cautious = !known && (need->known() > 0 || failure_ != 0);
    const std::int64_t most = clamp(search::kStepUnknown * static_cast<double>(size),
                                    std::min(lattice(options_).above(size), high), high);
    choice = largest_expected(*need, cautious ? most : high, power);
    if (failure_ != 0 && unforeseen() > 0) {
      choice = std::min(choice, std::max(middle(high), size));  // it may fail again
    }
    if (choice < options_.upper) {
      choice -= std::max<std::int64_t>(choice - size, 0) / search::kReservedPart;
    }
    choice = choice == 0 ? 0 : lattice(options_).floor(choice);
    const bool worth_it =
        static_cast<double>(choice) >= (1 + search::kWorthMoving) * static_cast<double>(size);
    choice = choice > size && !worth_it ? size : choice;
    if (choice < size && may_fit) {
      return size;
    }
    // Nothing is known of other sizes: one slightly larger shows it.
    if (!known && choice == size) {
      const auto part = static_cast<double>(size) * (1 + 1 / search::kLearningPart);
      const std::int64_t above = clamp(part, std::min(lattice(options_).above(size), high), high);
      const std::int64_t learns = detail::largest_up_to(size, above, [&](std::int64_t each) {
        return need->upper(static_cast<double>(each), options_.power) <= usable();
      });
      if (learns > size) {
        return expect(clamp(static_cast<double>(learns), options_.lower, high), options_.power);
      }
    }
    if (choice > best_) {
      return expect(clamp(static_cast<double>(choice), options_.lower, high), power);
    }
  }
  // A size that fitted is left only where it no longer fits. A larger one that fitted before it is
  // gone back to where that is expected: what the calls leave may have changed.
  const bool expects = is_trusted() && need->recorded();
  choice = std::max({choice, expects ? std::min(best_, size) : best_, may_fit ? size : 0});
  return choice == 0 ? std::min(half() > 0 && failure_ != 0 ? half() : size, high)
                     : clamp(static_cast<double>(choice), options_.lower, high);
}

/// Notes what `size` is expected to need, if that is to fit: then a failure is not foreseen.
std::int64_t SizeSearch::expect(std::int64_t size, double power) {
  const double bytes = need_->upper(static_cast<double>(size), power);
  if (bytes <= usable()) {
    expected_need_ = detail::whole_bytes(bytes);
  }
  return size;
}

std::int64_t SizeSearch::first_choice(std::int64_t high) {
  if (options_.strategy == Strategy::predictive) {
    if (const auto size = known_choice(high)) {
      return *size;
    }
    if (best_ == 0 && failure_ != 0) {
      return shrink_choice(high);
    }
    if (const std::int64_t size = expected_choice(high); size > 0) {
      return size;
    }
  }
  if (failure_ != 0) {
    const bool halving = options_.strategy == Strategy::halving;
    return best_ > 0 ? best_ : halving ? half() : middle(high);
  }
  const std::int64_t size = best_ > 0 ? 0 : hint();
  return size > 0 ? size : high;
}

/// Where the work was traced on fake tensors: the largest size that is expected to fit; 0 if these
/// do not tell, or have been wrong.
std::int64_t SizeSearch::expected_choice(std::int64_t high) const {
  const bool is_known = !foreseen_.empty() && is_trusted() && available_ >= 0 &&
                        (need_->foreseen() || need_->is_mostly_known()) &&
                        missed_ < search::kMostUnforeseen;
  return is_known ? lattice(options_).floor(largest_expected(*need_, high, Need::kSquare)) : 0;
}

/// The largest size that is expected to fit, or the next one as a proof. If two such guesses have
/// not halved what is left, the middle does.
std::int64_t SizeSearch::traced_choice(std::int64_t high) {
  const std::int64_t guess =
      stalls_ < 2 && need_ != nullptr ? largest_expected(*need_, high, Need::kSquare) : 0;
  if (guess >= options_.lower) {
    if (need_->is_mostly_known()) {
      expected_need_ = detail::whole_bytes(need_->upper(static_cast<double>(guess)));
    }
    return std::max(guess, lattice(options_).above(best_));
  }
  const auto low = static_cast<double>(std::max<std::int64_t>(best_, 1));
  constexpr double kFarApart = 4;
  const double far = kFarApart * low;
  return static_cast<double>(high) < far ? middle(high)
                                         : clamp(std::sqrt(low * static_cast<double>(high)),
                                                 lattice(options_).above(best_), high);
}

/// The next size that halving would try, without those that cannot fit. In between it tries what
/// fitted earlier, or what it calculates, as long as it has failed no more often than halving would
/// have until there: so it fails at most once more than halving, and ends no lower.
std::int64_t SizeSearch::shrink_choice(std::int64_t high) const {
  const auto failed = std::find_if(known_.rbegin(), known_.rend(), [&](const Attempt& attempt) {
    return !attempt.fitted() && attempt.size() == failure_;
  });
  // All that is available counts: halving would try a size that just fits.
  const auto all = static_cast<double>(available_);
  const auto shown = available_ < 0 || failed == known_.rend()
                         ? std::nullopt
                         : Need::of_failure(*failed, known_, options_.circumstances.in_use);
  // A need that does not explain the failure is that of another kind of call.
  const bool has_need = available_ >= 0 && is_trusted() && need_->recorded() &&
                        need_->upper(static_cast<double>(failure_)) > usable();
  const auto cannot_fit = [&](std::int64_t size) {
    const auto at = static_cast<double>(size);
    return (shown && shown->lower(at) > all) || (has_need && need_->lower(at) > all);
  };
  std::vector<std::int64_t> passed;  // sizes of halving
  std::int64_t half = first_ > 0 ? first_ : options_.upper;
  while (half > options_.lower && (half >= failure_ || cannot_fit(half))) {
    passed.push_back(half);
    half = std::max(options_.lower, floor_to_multiple(half / 2, options_.quantum));
  }
  std::int64_t guess = best_;
  std::int64_t spent = failures_;
  if (guess <= half) {
    guess = expected_choice(high);
    if (guess == 0 && has_need) {
      guess = largest_expected(*need_, high, Need::kSquare);
    } else if (guess == 0 && shown && failed->need() > failed->available) {
      // In proportion, any size above `most` fails where this one did. Most works go on to need
      // more: it takes the place of a size of halving that could be left out. It is worth a failure
      // of its own where one request is too large by itself; the middle is, where little was
      // missing and nothing shows yet how the need grows.
      const double times =
          std::max(shown->lower(static_cast<double>(failure_)) / std::max(usable(), 1.0), 1.0);
      const double most = static_cast<double>(failure_) / times;
      const bool learns = failures_ <= 1 && !failed->trace && times < search::kClearly;
      const bool is_one = failed->trace && static_cast<double>(*failed->requested) > usable();
      guess = static_cast<std::int64_t>(learns ? std::midpoint(static_cast<double>(half), most)
                                               : most * (1 - search::kGuessMargin));
      spent += learns || is_one ? 0 : 1;
    }
    const Attempt* last = last_fit();
    if (has_need && last != nullptr && last->size() <= high && !cannot_fit(last->size())) {
      guess = std::max(guess, last->size());
    }
  }
  const auto is_above = [&](std::int64_t size) { return size > guess; };
  const bool affordable = guess > half && spent <= std::ranges::count_if(passed, is_above);
  return clamp(static_cast<double>(affordable ? guess : half), options_.lower, high);
}

std::int64_t SizeSearch::narrow_choice(std::int64_t high) const {
  if (fits_ == 0) {
    return shrink_choice(high);
  }
  // Two guesses may miss, then the middle halves what is left: at most three times the attempts of
  // bisecting.
  const Need* need = stalls_ < 2 && available_ >= 0 ? need_.get() : nullptr;
  // A guess at or below the best is answered by the step above it, which either fails, and the
  // search is over, or shows that there is more.
  return need != nullptr ? clamp(static_cast<double>(largest_expected(*need, high, Need::kSquare)),
                                 lattice(options_).above(best_), high)
                         : middle(high);
}

std::int64_t SizeSearch::probe_choice(std::int64_t high) {
  if (best_ == 0 && failed_here_) {
    return shrink_choice(high);
  }
  const Need* need = usable() < 0 || !is_trusted() ? nullptr : need_.get();
  if (need == nullptr && best_ == 0) {
    const std::int64_t start = hint();
    return start > 0 ? start
                     : clamp(static_cast<double>(options_.upper) / search::kProbeShare,
                             options_.lower, high);
  }
  const bool known = need != nullptr && need->recorded() && need->is_mostly_known();
  double target = 2.0 * static_cast<double>(best_);
  if (need != nullptr) {
    const double most = known ? static_cast<double>(high) : search::kProbeGrowth * need->size();
    target = static_cast<double>(
        largest_expected(*need, clamp(most, options_.lower, high), Need::kSquare));
    // Between tiny sizes, or where most of the need is constant, the cautious bound may allow no
    // step. To stay there would cost more, for good, than the one failure that this risks.
    if (!known && fits_ < 3 && best_ > 0 && failure_ == 0) {
      target = std::max(target, static_cast<double>(lattice(options_).above(best_)));
    }
    if (failure_ != 0 && unforeseen() > 0) {
      target = std::min(target, static_cast<double>(middle(high)));  // it may fail again
    }
  }
  if (failure_ != 0 && best_ > 0 && (failed_here_ || need == nullptr)) {
    // The model did not see this failure coming, or there is none. An eighth is not worth a second
    // one.
    if (best_ >= failure_ - failure_ / 8) {
      return best_;
    }
    target = std::min(target, static_cast<double>(middle(high)));
  }
  const std::int64_t choice = clamp(target, options_.lower, high);
  if (need != nullptr && choice > best_) {
    expect(choice, Need::kSquare);
  }
  if (best_ == 0 || choice == options_.upper) {
    return choice;
  }
  const auto width =
      static_cast<std::int64_t>(std::bit_width(static_cast<std::uint64_t>(options_.upper)));
  const bool late = grown_ > 12 + 2 * width;
  const double gain = static_cast<double>(choice - best_) / static_cast<double>(best_);
  return gain < (late ? search::kWorthMovingLate : search::kWorthMovingInParts) ? best_ : choice;
}

}  // namespace brim
