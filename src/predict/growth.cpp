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
// Beyond so many times the size of a single fit, most of its need may have been constant.
constexpr double kFarBeyond = 4;
// A failure's need is a lower bound, so a line to it is too flat: one that ends below this part of
// the proportional size is not believed. (A constant half of the need gives 0.75.)
constexpr double kPlausible = 0.7;
// Two failures were of the same tensor if what they asked for differs as their sizes do, to this
// share.
constexpr double kSameRequest = 0.02;
// Where they were not, at most this share of the bytes is taken to be constant.
constexpr double kLargestConstant = 0.05;
// One failure with a wild number must not throw the search to the bottom.
constexpr double kLargestShrink = 1024;

double size_of(const Attempt& attempt) { return static_cast<double>(attempt.size()); }
double need_of(const Attempt& attempt) { return static_cast<double>(*attempt.need()); }

double slope(const Attempt& from, const Attempt& to) {
  return (need_of(to) - need_of(from)) / (size_of(to) - size_of(from));
}

/// Where the line through both needs `bytes`.
double on_line(const Attempt& from, const Attempt& to, double bytes) {
  return size_of(from) + (bytes - need_of(from)) / slope(from, to);
}

double proportional(const Attempt& attempt, double bytes) {
  return need_of(attempt) <= 0 ? kInfinity : size_of(attempt) * bytes / need_of(attempt);
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
/// negative, needs `bytes`. No further than in proportion to the larger one.
double on_parabola(const Attempt& first, const Attempt& last, double bytes) {
  const double s0 = size_of(first);
  const double s1 = size_of(last);
  const double growth = slope(first, last);
  double size = kInfinity;
  if (const double c = growth / (s0 + s1); growth > 0 && need_of(last) >= c * s1 * s1) {
    size = std::sqrt((bytes - need_of(last)) / c + s1 * s1);
  } else if (growth > 0) {
    // The constant would be negative: b s + c s². Where b is too, c s² is as steep as it gets.
    const double square = (need_of(last) / s1 - need_of(first) / s0) / (s1 - s0);
    const double b = need_of(last) / s1 - square * s1;
    size = b >= 0 ? root(-bytes, b, square) : s1 * std::sqrt(bytes / need_of(last));
  }
  return std::min(size, proportional(last, bytes));
}

}  // namespace

bool explains(const Attempt& failure, double available) {
  constexpr double kHalf = 0.5;
  return need_of(failure) >= kHalf * available;
}

Growth::Growth(std::span<const Attempt> attempts) {
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
}

/// The next smaller fit that is far enough away for the difference to mean something.
std::size_t Growth::apart_from(std::size_t fit) const {
  std::size_t i = fit - 1;
  while (i > 0 && kApart * size_of(*fits_[i]) > size_of(*fits_[fit])) {
    --i;
  }
  return i;
}

std::optional<Growth::Prediction> Growth::largest_within(double bytes, bool cautious) const {
  if (fits_.empty()) {
    return std::nullopt;
  }
  const auto over = std::find_if(fits_.begin(), fits_.end(),
                                 [&](const Attempt* fit) { return need_of(*fit) > bytes; });
  if (over != fits_.end()) {
    // Less is available than a fit once used: between two fits, no model beats the straight line.
    return Prediction{
        over == fits_.begin() ? below_fits(bytes) : on_line(**(over - 1), **over, bytes), true};
  }
  const Attempt& last = *fits_.back();
  if (fits_.size() >= 3) {
    const std::size_t newest = fits_.size() - 1;
    const std::size_t middle = std::max<std::size_t>(apart_from(newest), 1);
    const Line line(*fits_[apart_from(middle)], *fits_[middle], last);
    if (line.confirmed()) {
      return Prediction{line.size_beyond(last, bytes), true};
    }
  } else if (fits_.size() + failures_.size() >= 3 && !failures_.empty()) {
    // A failure says "at least": only on a line with the others is it taken at its word.
    const Attempt& failure = *failures_.front();
    const Line line = fits_.size() == 2 ? Line(*fits_.front(), last, failure)
                                        : Line(last, failure, *failures_[1]);
    if (line.confirmed() && line.rises() && need_of(failure) > need_of(last)) {
      return Prediction{on_line(last, failure, bytes), true};
    }
  }
  if (fits_.size() > 1) {
    return Prediction{on_parabola(*fits_[apart_from(fits_.size() - 1)], last, bytes), false};
  }
  if (cautious) {
    return Prediction{size_of(last) * std::sqrt(bytes / std::max(need_of(last), 1.0)), false};
  }
  const double straight = proportional(last, bytes);
  if (straight <= kFarBeyond * size_of(last)) {
    return Prediction{straight, false};
  }
  const auto larger = std::find_if(failures_.begin(), failures_.end(), [&](const Attempt* failure) {
    return failure->size() > last.size() && need_of(*failure) > need_of(last);
  });
  return larger == failures_.end()
             ? std::nullopt
             : std::optional(Prediction{on_line(last, **larger, bytes), false});
}

/// Less is available than any fit used. Proportional, unless a larger point shows that part of the
/// need is constant.
double Growth::below_fits(double bytes) const {
  const Attempt& smallest = *fits_.front();
  const double straight = proportional(smallest, bytes);
  const auto line_to = [&](std::span<const Attempt* const> points) {
    const auto point = std::find_if(points.begin(), points.end(), [&](const Attempt* it) {
      return size_of(*it) >= kApart * size_of(smallest) && need_of(*it) > need_of(smallest);
    });
    return point == points.end() ? -1.0 : on_line(smallest, **point, bytes);
  };
  const double to_fit = line_to(fits_);
  const double to_failure = line_to(failures_);
  const bool plausible = to_failure >= kPlausible * straight;
  return std::min(straight, to_fit > 0 ? to_fit : plausible ? to_failure : straight);
}

std::optional<Growth::Prediction> Growth::below_failure(std::int64_t size, double bytes) const {
  const auto at = std::find_if(failures_.begin(), failures_.end(),
                               [&](const Attempt* failure) { return failure->size() == size; });
  if (at == failures_.end() || !explains(**at, bytes)) {
    return std::nullopt;
  }
  const Attempt& newest = **at;
  const double need = std::max(need_of(newest), 1.0);
  const double straight =
      size_of(newest) * std::max(std::min(bytes / need, 1.0), 1 / kLargestShrink);
  if (at + 1 == failures_.end()) {
    return Prediction{straight, false};
  }
  const Attempt& larger = **(at + 1);
  // What the larger one asked for, at this size.
  const double passed = static_cast<double>(*larger.requested) * size_of(newest) / size_of(larger);
  if (*newest.peak > *larger.peak || *newest.requested > *larger.requested) {
    // It got further: the two are no points of one line. But what was held when the larger one
    // failed bounds the constant part, and so does what is held now less the request that has
    // passed since.
    const double constant = std::clamp(
        std::min(static_cast<double>(*larger.peak), static_cast<double>(*newest.peak) - passed),
        0.0, kLargestConstant * bytes);
    return Prediction{size_of(newest) * std::min((bytes - constant) / (need - constant), 1.0),
                      false};
  }
  // Two different requests that happen to fall in order look like a large constant part.
  const double affine = need_of(larger) > need ? on_line(newest, larger, bytes) : 0.0;
  const bool same_request =
      std::abs(static_cast<double>(*newest.requested) - passed) <= kSameRequest * passed;
  const bool plausible = same_request || affine >= kPlausible * straight;
  return Prediction{plausible ? std::clamp(affine, straight / kLargestShrink, straight) : straight,
                    true};
}

}  // namespace brim::detail
