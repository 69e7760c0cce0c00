#include "adapt/growth_model.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

namespace brim::detail {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A third point confirms a line when it is off by no more than this share of the growth between the
// outer two. Measured against the growth and not against the need: where most of the need is
// constant, three points of a parabola are within a percent of each other too.
constexpr double kLineTolerance = 0.01;

// Allocators hand out in granules: 64 B on the CPU, 512 B in CUDA's statistics, 2 MiB for its
// segments.
constexpr std::int64_t kLargestGranule = std::int64_t{2} << 20;

// One failure with a wild number must not throw the search to the bottom.
constexpr double kLargestFirstShrink = 1024.0;
constexpr double kLargestLaterShrink = 16.0;

// Of two failures: the requests are one and the same when they differ as their sizes do, to this
// share.
constexpr double kSameRequest = 0.02;
// Else a line through them is believed down to this part of the proportional size (a constant half
// gives 0.75).
constexpr double kPlausibleLine = 0.7;
// And where they are no line, no more than this share of the available bytes is taken to be
// constant.
constexpr double kLargestGuessedConstant = 0.05;

// Two sizes this far apart differ by more than what an allocator rounds.
constexpr double kApart = 1.1;
// One small fit says little about a size more than so many times larger: most of its need may be
// constant.
constexpr double kFarBeyond = 4.0;

double slope(const NeedPoint& from, const NeedPoint& to) {
  return (static_cast<double>(to.need) - static_cast<double>(from.need)) /
         (static_cast<double>(to.size) - static_cast<double>(from.size));
}

double proportional(const NeedPoint& point, double available) {
  return point.need <= 0
             ? kInfinity
             : static_cast<double>(point.size) * available / static_cast<double>(point.need);
}

// How coarse the measured bytes look: the largest power of two that divides both differences. A
// line through bytes rounded to granules may be wrong by one granule over its length, however well
// it fits.
double granule(std::int64_t first, std::int64_t second) {
  const auto bits = static_cast<std::uint64_t>(first) | static_cast<std::uint64_t>(second);
  const std::uint64_t lowest = bits & (~bits + 1);
  return static_cast<double>(lowest == 0
                                 ? kLargestGranule
                                 : std::min<std::uint64_t>(lowest, std::uint64_t{kLargestGranule}));
}

struct Line {
  NeedPoint first, middle, last;

  [[nodiscard]] double rise() const {
    return static_cast<double>(last.need) - static_cast<double>(first.need);
  }
  [[nodiscard]] double length() const {
    return static_cast<double>(last.size) - static_cast<double>(first.size);
  }
  [[nodiscard]] double grain() const {
    return granule(middle.need - first.need, last.need - first.need);
  }
  [[nodiscard]] double residual() const {
    return std::abs(static_cast<double>(middle.need) - static_cast<double>(first.need) -
                    slope(first, last) *
                        (static_cast<double>(middle.size) - static_cast<double>(first.size)));
  }
  [[nodiscard]] bool confirmed() const {
    return residual() <= kLineTolerance * std::max(rise(), 0.0) + grain();
  }
};

double beyond_line(const Line& line, double available) {
  // The line turned up as far as residual and rounding allow, and one granule more: the further
  // the jump, the more it holds back.
  const double doubt = 2 * line.residual() + line.grain();
  const double growth = (std::max(line.rise(), 0.0) + doubt) / line.length();
  const auto last = static_cast<double>(line.last.size);
  const double left = available - static_cast<double>(line.last.need) - line.grain();
  return last + std::max(left, 0.0) / growth;
}

// a + b s + c s² = 0 at its larger root, for c > 0 and a < 0.
double larger_root(double a, double b, double c) {
  return (-b + std::sqrt(b * b - 4 * a * c)) / (2 * c);
}

double beyond_parabola(const Line& points, double available) {
  const auto s1 = static_cast<double>(points.middle.size);
  const auto s2 = static_cast<double>(points.last.size);
  const double b = slope(points.middle, points.last);
  const double c = (b - slope(points.first, points.middle)) / points.length();
  // In d = s - s2, around the last point, where need + (b + c (s2 - s1)) d + c d² meets what is
  // available.
  return s2 + larger_root(static_cast<double>(points.last.need) - available, b + c * (s2 - s1), c);
}

// Two points allow anything between a line, a parabola that starts flat and one that starts at
// nothing.
Growth beyond_two(const NeedPoint& first, const NeedPoint& last, double available) {
  const auto s0 = static_cast<double>(first.size);
  const auto s1 = static_cast<double>(last.size);
  const double left = available - static_cast<double>(last.need);
  const double growth = slope(first, last);
  const double affine = growth <= 0 ? kInfinity : s1 + left / growth;
  // a + c s², whose c is the growth divided by s0 + s1.
  const double square = growth <= 0 ? kInfinity : std::sqrt(s1 * s1 + left * (s0 + s1) / growth);
  double size = std::min(proportional(last, available), square);
  if (affine < size) {
    // The line would need less than nothing at size 0, so nothing at 0 is the third point.
    size = std::min(affine, beyond_parabola({{0, 0}, first, last}, available));
  }
  return {size, false, affine};
}

// Less is available than any fit used. Proportional, unless a larger point shows that part of the
// need is constant; one too close to the smallest fit shows nothing but how the allocator rounds.
double below_all(std::span<const NeedPoint> fits, std::span<const NeedPoint> failures,
                 double available) {
  const NeedPoint& smallest = fits.front();
  const double straight = proportional(smallest, available);
  const auto line_to = [&](std::span<const NeedPoint> points) -> std::optional<double> {
    for (const NeedPoint& point : points) {
      if (static_cast<double>(point.size) >= kApart * static_cast<double>(smallest.size) &&
          point.need > smallest.need) {
        return static_cast<double>(smallest.size) -
               (static_cast<double>(smallest.need) - available) / slope(smallest, point);
      }
    }
    return std::nullopt;
  };
  if (const auto line = line_to(fits)) {
    return *line > 0 ? std::min(straight, *line) : straight;
  }
  const auto line = line_to(failures);  // a failure says "at least": not believed too far
  return line && *line >= kPlausibleLine * straight ? std::min(straight, *line) : straight;
}

// Three points far enough apart for their differences to mean something, counted back from the
// last.
Line spread(std::span<const NeedPoint> points) {
  const auto apart = [&](std::size_t from) {
    std::size_t i = from - 1;
    while (i > 0 &&
           static_cast<double>(points[i].size) > 0.75 * static_cast<double>(points[from].size)) {
      --i;
    }
    return i;
  };
  const std::size_t last = points.size() - 1;
  const std::size_t middle = std::max<std::size_t>(apart(last), 1);
  return {points[apart(middle)], points[middle], points[last]};
}

}  // namespace

double size_after_failures(const FailurePoint& newest, const std::optional<FailurePoint>& larger,
                           double available) {
  const auto size = static_cast<double>(newest.size);
  const double need = std::max(newest.need(), 1.0);
  const double straight = size * std::min(available / need, 1.0);
  if (!larger) {
    return std::max(straight, size / kLargestFirstShrink);
  }
  const auto larger_size = static_cast<double>(larger->size);
  const double floor = size / kLargestLaterShrink;
  if (newest.peak > larger->peak || newest.requested > larger->requested) {
    // It got further: the two are no points of one line. But what was held when the larger one
    // failed bounds the constant part, and so does what is held now less the request that has
    // passed since.
    const double passed = static_cast<double>(larger->requested) * size / larger_size;
    const double constant = std::clamp(
        std::min(static_cast<double>(larger->peak), static_cast<double>(newest.peak) - passed), 0.0,
        kLargestGuessedConstant * available);
    return std::max(size * std::min((available - constant) / (need - constant), 1.0), floor);
  }
  const double growth = (larger->need() - need) / (larger_size - size);
  const double affine = growth > 0 ? size - (need - available) / growth : 0.0;
  const double expected = static_cast<double>(larger->requested) * size / larger_size;
  const bool same_request =
      std::abs(static_cast<double>(newest.requested) - expected) <= kSameRequest * expected;
  if (!same_request && growth > 0 && affine < kPlausibleLine * straight) {
    // Two different requests that happen to fall in order look like a constant part beyond what is
    // common.
    return std::max(straight, floor);
  }
  return std::max(std::min(straight, affine), floor);
}

std::optional<Growth> largest_within(std::span<const NeedPoint> fits,
                                     std::span<const NeedPoint> failures, double available,
                                     bool probing) {
  if (fits.empty()) {
    return std::nullopt;
  }
  const auto over = std::find_if(fits.begin(), fits.end(), [&](const NeedPoint& p) {
    return static_cast<double>(p.need) > available;
  });
  if (over != fits.end()) {
    // Less is available than a fit once used: between two fits, no model beats the straight line.
    const double size =
        over == fits.begin()
            ? below_all(fits, failures, available)
            : static_cast<double>((over - 1)->size) +
                  (available - static_cast<double>((over - 1)->need)) / slope(*(over - 1), *over);
    return Growth{size, true, size};
  }
  const NeedPoint& last = fits.back();
  if (fits.size() < 3 && !failures.empty() && fits.size() + failures.size() >= 3) {
    const Line line =
        fits.size() == 2 ? Line{fits[0], last, failures[0]} : Line{last, failures[0], failures[1]};
    // A failure says "at least": only when it lies on a line with the others is it taken at its
    // word.
    if (line.confirmed() && line.rise() > 0 && failures[0].need > last.need) {
      const double size = static_cast<double>(last.size) +
                          (available - static_cast<double>(last.need)) / slope(last, failures[0]);
      return Growth{size, true, size};
    }
  }
  if (fits.size() == 1) {
    const double size = proportional(last, available);
    if (!probing && size > kFarBeyond * static_cast<double>(last.size)) {
      const auto larger = std::find_if(failures.begin(), failures.end(), [&](const NeedPoint& p) {
        return p.size > last.size && p.need > last.need;
      });
      if (larger == failures.end()) {
        return std::nullopt;
      }
      const double line = static_cast<double>(last.size) +
                          (available - static_cast<double>(last.need)) / slope(last, *larger);
      return Growth{line, false, line};
    }
    // k times the size needs at most k² times as much, unless the growth is cubic.
    const double square = std::sqrt(static_cast<double>(last.size)) * std::sqrt(size);
    return Growth{probing ? square : size, false, size};
  }
  if (fits.size() == 2) {
    return beyond_two(fits[0], last, available);
  }
  const Line line = spread(fits);
  if (line.confirmed()) {
    const double size = beyond_line(line, available);
    return Growth{size, true, size};
  }
  const bool convex = slope(line.middle, line.last) > slope(line.first, line.middle);
  const double size = convex ? beyond_parabola(line, available)
                             : beyond_two(line.middle, line.last, available).size;
  return Growth{size, false, size};
}

}  // namespace brim::detail
