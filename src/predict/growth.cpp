#include "predict/growth.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace brim::detail {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A third point confirms a line when it is off by no more than this share of the growth between the
// outer two. Measured against the growth and not against the need: where most of the need is
// constant, three points of a parabola are within a percent of each other too.
constexpr double kLineTolerance = 0.01;
// Allocators round to granules: 64 B on the CPU, 512 B in CUDA's statistics, 2 MiB for its
// segments.
constexpr std::int64_t kLargestGranule = std::int64_t{2} << 20;
// Two sizes this far apart differ by more than what an allocator rounds.
constexpr double kApart = 4.0 / 3;
// Figures that differ by less than this share are taken as equal: what an allocator rounds.
constexpr double kAlike = 0.002;
// A line that starts this close to zero starts there: the bytes are rounded, and CUDA's allocator
// gives blocks that are up to 1 MiB too large.
constexpr double kNearZero = 0.01;
// Room that differs by more than this factor is other room.
constexpr double kComparable = 1.1;
// A failure whose last request is this share of its need failed because of one tensor.
constexpr double kDominates = 0.5;

double size_of(const Attempt& attempt) { return static_cast<double>(attempt.size()); }
double need_of(const Attempt& attempt) { return static_cast<double>(*attempt.need()); }

double slope(const Attempt& from, const Attempt& to) {
  return (need_of(to) - need_of(from)) / (size_of(to) - size_of(from));
}

/// Where the line through both needs `bytes`.
double on_line(const Attempt& from, const Attempt& to, double bytes) {
  return size_of(from) + (bytes - need_of(from)) / slope(from, to);
}

/// Whether a failure's need is mostly one tensor.
bool dominated(const Attempt& failure) {
  return static_cast<double>(*failure.requested) >= kDominates * need_of(failure);
}

double proportional(const Attempt& attempt, double bytes) {
  return need_of(attempt) <= 0 ? kInfinity : size_of(attempt) * bytes / need_of(attempt);
}

/// The need as a failure shows it if one tensor makes it up: what was asked for grows with a power
/// of the size, and what was held before either grows alike or not at all.
class OneTensor {
 public:
  OneTensor(const Attempt& failure, double power, bool constant)
      : size_(size_of(failure)),
        power_(power),
        constant_(constant ? static_cast<double>(*failure.peak) : 0.0),
        growing_(need_of(failure) - constant_) {}

  [[nodiscard]] double need_at(double size) const {
    return constant_ + growing_ * std::pow(size / size_, power_);
  }
  [[nodiscard]] double size_at(double bytes) const {
    return size_ * std::pow(std::max(bytes - constant_, 0.0) / growing_, 1 / power_);
  }

 private:
  double size_;
  double power_;
  double constant_;
  double growing_;
};

/// The curve of the first failure if one tensor caused it, and one of the same kind caused another
/// at a larger size. Both show how that tensor grows.
std::optional<OneTensor> same_tensor_again(std::span<const Attempt* const> failures) {
  const Attempt& failure = *failures.front();
  if (!dominated(failure)) {
    return std::nullopt;
  }
  const auto requested = static_cast<double>(*failure.requested);
  for (const Attempt* larger : failures.subspan(1)) {
    for (const double power : {1.0, 2.0, 3.0}) {
      const double growth = std::pow(size_of(*larger) / size_of(failure), power);
      if (alike(static_cast<double>(*larger->requested), growth * requested)) {
        const double held = need_of(*larger) - static_cast<double>(*larger->requested);
        const bool constant = dominated(*larger) && alike(held + requested, need_of(failure));
        return OneTensor(failure, power, constant);
      }
    }
  }
  return std::nullopt;
}

/// Three attempts in ascending order, as points of a line.
class Line {
 public:
  Line(const Attempt& first, const Attempt& middle, const Attempt& last)
      : rise_(need_of(last) - need_of(first)), length_(size_of(last) - size_of(first)) {
    // How coarse the bytes look: the largest power of two that divides both differences. A line
    // through rounded bytes may be wrong by one granule, however well it fits.
    const auto bits = static_cast<std::uint64_t>(*middle.need() - *first.need()) |
                      static_cast<std::uint64_t>(*last.need() - *first.need());
    const std::uint64_t lowest = bits & (~bits + 1);
    constexpr std::uint64_t kMost{kLargestGranule};
    grain_ = static_cast<double>(lowest == 0 ? kMost : std::min(lowest, kMost));
    residual_ = std::abs(need_of(middle) - need_of(first) -
                         rise_ / length_ * (size_of(middle) - size_of(first)));
  }

  [[nodiscard]] bool confirmed() const {
    return residual_ <= kLineTolerance * std::max(rise_, 0.0) + grain_;
  }
  [[nodiscard]] bool rises() const { return rise_ > 0; }

  /// The line turned up as far as residual and rounding allow, and one granule more: the further
  /// the jump, the more it holds back.
  [[nodiscard]] double size_beyond(const Attempt& fit, double bytes) const {
    const double growth = (std::max(rise_, 0.0) + 2 * residual_ + grain_) / length_;
    return size_of(fit) + std::max(bytes - need_of(fit) - grain_, 0.0) / growth;
  }

 private:
  double rise_;
  double length_;
  double grain_;
  double residual_;
};

/// Where a + b s + c s² reaches 0, for a < 0 and c > 0.
double root(double a, double b, double c) { return (-b + std::sqrt(b * b - 4 * a * c)) / (2 * c); }

/// Where the steepest sum of 1, s and s² through both fits, with coefficients that are not
/// negative, needs `bytes`.
double on_parabola(const Attempt& first, const Attempt& last, double bytes) {
  const double s0 = size_of(first);
  const double s1 = size_of(last);
  if (const double c = slope(first, last) / (s0 + s1); need_of(last) >= c * s1 * s1) {
    return std::sqrt((bytes - need_of(last)) / c + s1 * s1);
  }
  // The constant would be negative: b s + c s². Where b is too, c s² is as steep as it gets.
  const double c = (need_of(last) / s1 - need_of(first) / s0) / (s1 - s0);
  const double b = need_of(last) / s1 - c * s1;
  return b >= 0 ? root(-bytes, b, c) : s1 * std::sqrt(bytes / need_of(last));
}

/// Whether the smaller of two fits allocated so much more often that its items went in parts. A
/// first call allocates more often too (an optimizer's state), but not in that proportion.
bool went_in_parts(const Attempt& smaller, const Attempt& larger) {
  const double times = size_of(larger) / size_of(smaller);
  const double in_proportion = (times - 1) * static_cast<double>(larger.allocations);
  const auto more = static_cast<double>(smaller.allocations - larger.allocations);
  return more > in_proportion / 2 && more < 2 * in_proportion;
}

}  // namespace

bool alike(double a, double b) { return std::abs(a - b) <= kAlike * std::max(a, b); }

bool explains(const Attempt& failure, double available) {
  constexpr double kHalf = 0.5;
  return need_of(failure) >= kHalf * available;
}

Growth::Growth(std::span<const Attempt> attempts) {
  const auto fitting = std::ranges::find_if(attempts, &Attempt::fitted);
  overshot_ = !std::all_of(fitting, attempts.end(), [](const Attempt& it) { return it.fitted(); });
  const auto collect = [&](bool fitted) {
    const auto first = static_cast<std::ptrdiff_t>(points_.size());
    for (const Attempt& attempt : attempts) {
      if (attempt.fitted() == fitted && attempt.need()) {
        points_.push_back(&attempt);
      }
    }
    std::sort(points_.begin() + first, points_.end(),
              [](const Attempt* a, const Attempt* b) { return a->size() < b->size(); });
  };
  collect(true);
  const std::size_t fits = points_.size();
  collect(false);
  const std::span<const Attempt* const> points(points_.data(), points_.size());
  fits_ = points.first(fits);
  failures_ = points.subspan(fits);
  in_parts_ = std::ranges::any_of(
      fits_, [&](const Attempt* fit) { return went_in_parts(*fit, *fits_.back()); });
}

/// Whether a failure needed more than the curve says, which gives the size for a need.
template <class Curve>
bool Growth::refuted(const Curve& size_at) const {
  return std::ranges::any_of(failures_, [&](const Attempt* failure) {
    return size_at(need_of(*failure)) > (1 + kAlike) * size_of(*failure);
  });
}

/// The next smaller fit that is far enough away for the difference to mean something.
std::size_t Growth::apart_from(std::size_t fit) const {
  std::size_t i = fit - 1;
  while (i > 0 && kApart * size_of(*fits_[i]) > size_of(*fits_[fit])) {
    --i;
  }
  return i;
}

Growth::Prediction Growth::largest_within(double bytes, bool trust_two) const {
  const Attempt& last = *fits_.back();
  const auto straight = [&](double need) { return proportional(last, need); };
  if (in_parts_ && trust_two && !refuted(straight)) {
    return {straight(bytes), false};
  }
  for (std::size_t i = 0; trust_two && i < failures_.size(); ++i) {
    const auto curve = same_tensor_again(failures_.subspan(i));
    if (curve && alike(curve->need_at(size_of(last)), need_of(last))) {
      return {curve->size_at(bytes), true};
    }
  }
  const auto over = std::find_if(fits_.begin(), fits_.end(),
                                 [&](const Attempt* fit) { return need_of(*fit) > bytes; });
  if (over != fits_.end()) {
    // Less is available than a fit once used: between two fits, no model beats the straight line.
    return {over == fits_.begin() ? below_fits(bytes) : on_line(**(over - 1), **over, bytes), true};
  }
  if (fits_.size() >= 3 && !overshot_) {
    const std::size_t newest = fits_.size() - 1;
    const std::size_t middle = std::max<std::size_t>(apart_from(newest), 1);
    const Line line(*fits_[apart_from(middle)], *fits_[middle], last);
    const auto size_at = [&](double need) { return line.size_beyond(last, need); };
    if (line.confirmed() && !refuted(size_at)) {
      return {size_at(bytes), true};
    }
  }
  if (fits_.size() > 1) {
    return beyond_two_fits(bytes, trust_two);
  }
  const double size =
      size_of(last) * std::pow(bytes / std::max(need_of(last), 1.0), 1 / steepest_power());
  // Below one or two items nothing is tried that would show how the need grows: the next size has
  // to.
  const double next = size_of(last) + 1;
  const bool steps_up = last.size() <= 2 && straight(bytes) >= next && !refuted(straight);
  return {steps_up ? std::max(size, next) : size, false};
}

/// With which power the need grows at least beyond the largest fit, and 2.
double Growth::steepest_power() const {
  const Attempt& last = *fits_.back();
  double power = 2;
  for (const Attempt* failure : failures_) {
    if (failure->size() > last.size() && need_of(*failure) > need_of(last)) {
      power = std::max(power, std::log(need_of(*failure) / std::max(need_of(last), 1.0)) /
                                  std::log(size_of(*failure) / size_of(last)));
    }
  }
  return power;
}

Growth::Prediction Growth::beyond_two_fits(double bytes, bool trust_two) const {
  const Attempt& last = *fits_.back();
  const Attempt& first = *fits_[apart_from(fits_.size() - 1)];
  // Whatever the constant part, no sum of 1 and s needs more than in proportion.
  const auto straight = [&](double need) { return proportional(last, need); };
  if (slope(first, last) <= 0) {
    return {straight(bytes), false};
  }
  // A line that starts below zero is a need that curves upwards.
  const auto line = [&](double need) { return on_line(first, last, need); };
  const bool upwards = line(bytes) < (1 - kNearZero) * straight(bytes);
  // So is one above the fit before, however close: the need was constant at first, and grows as
  // from there.
  const Attempt& before = *fits_[fits_.size() - 2];
  const bool bends = slope(before, last) > slope(first, last) &&
                     line(need_of(before)) < (1 - kNearZero) * size_of(before);
  if (trust_two && !overshot_ && !upwards && !bends && !refuted(line)) {
    return {line(bytes), false};
  }
  const auto parabola = [&](double need) { return on_parabola(first, last, need); };
  double size = parabola(bytes);
  if (refuted(parabola)) {
    size = std::min(size, straight(bytes));
  }
  if (bends) {
    size = std::min(size, on_line(before, last, bytes));
  }
  return {size, false};
}

/// Less is available than any fit used. Proportional, unless a larger fit shows that part of the
/// need is constant.
double Growth::below_fits(double bytes) const {
  const Attempt& smallest = *fits_.front();
  const double straight = proportional(smallest, bytes);
  const auto larger = std::ranges::find_if(fits_, [&](const Attempt* fit) {
    return size_of(*fit) >= kApart * size_of(smallest) && need_of(*fit) > need_of(smallest);
  });
  const double line = larger == fits_.end() ? 0 : on_line(smallest, **larger, bytes);
  return line > 0 ? std::min(line, straight) : straight;
}

double Growth::ceiling(double bytes) const {
  const auto is_above = [&](const Attempt* failure) {
    // What had other room to run in may have been other work (before an optimizer had its state).
    const auto available = static_cast<double>(failure->available.value_or(-1));
    const bool comparable =
        available < 0 || (kComparable * available > bytes && available < kComparable * bytes);
    return comparable && failure->size() > fits_.back()->size() &&
           need_of(*failure) > need_of(*fits_.back());
  };
  // Those further away are further above a need that curves upwards.
  const auto failure = std::ranges::find_if(failures_, is_above);
  if (failure == failures_.end()) {
    return kInfinity;
  }
  // What limits the fit (an optimizer's step) may not be what failed: that is below the line.
  return std::max(on_line(*fits_.back(), **failure, bytes), proportional(**failure, bytes));
}

std::optional<Growth::Ceiling> Growth::below_failure(std::int64_t size, double bytes) const {
  const auto at = std::ranges::find_if(
      failures_, [&](const Attempt* failure) { return failure->size() == size; });
  if (at == failures_.end() || !explains(**at, bytes)) {
    return std::nullopt;
  }
  const Attempt& failure = **at;
  const double share = std::min(bytes / std::max(need_of(failure), 1.0), 1.0);
  const auto index = static_cast<std::size_t>(at - failures_.begin());
  // Until two failures show that the need grows no faster than the square, it may with the cube.
  const bool slower = std::ranges::any_of(failures_.subspan(index + 1), [&](const Attempt* larger) {
    const double times = size_of(*larger) / size_of(failure);
    return dominated(*larger) && need_of(*larger) <= times * times * need_of(failure);
  });
  const double most = size_of(failure) * (slower ? std::sqrt(share) : std::cbrt(share));
  if (!dominated(failure)) {
    return Ceiling{most, 0};
  }
  if (const auto curve = same_tensor_again(failures_.subspan(index))) {
    const double largest = std::min(curve->size_at(bytes), size_of(failure));
    return Ceiling{largest, largest};
  }
  return Ceiling{most, size_of(failure) * share};
}

}  // namespace brim::detail
