#include "predict/probe_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <ranges>

#include "bisect.h"
#include "check_argument.h"
#include "predict/phase_fit.h"
#include "predict/predict_constants.h"

namespace brim::detail {
namespace {

double log_range(std::int64_t low, std::int64_t high) {
  return std::log(static_cast<double>(high) / static_cast<double>(low));
}

}  // namespace

ProbePlan::ProbePlan(std::vector<Shape> candidates, SizeKind kind, std::int64_t probes)
    : candidates_(std::move(candidates)), kind_(kind) {
  const auto least = static_cast<std::int64_t>(least_shapes(kind));
  check_argument(probes >= least, "probes must be ", least, " or more, got ", probes);
  for (const auto& [n, length] : candidates_) {
    check_argument(n >= 1, "sizes must be positive, got ", n);
    check_argument(length >= 1 || kind == SizeKind::size, "sizes must be positive, got ", length);
  }
  std::sort(candidates_.begin(), candidates_.end(), [](const Shape& a, const Shape& b) {
    const auto cost = [](const Shape& shape) {
      return static_cast<double>(shape.first) * std::max(1.0, static_cast<double>(shape.second));
    };
    return std::pair(cost(a), a) < std::pair(cost(b), b);
  });
  candidates_.erase(std::unique(candidates_.begin(), candidates_.end()), candidates_.end());
  check_argument(candidates_.size() >= least_shapes(kind), "sizes must hold at least ", least,
                 " different ones for a fit, got ", candidates_.size());
  least_ = most_ = candidates_.front();
  for (const Shape& shape : candidates_) {
    least_ = {std::min(least_.first, shape.first), std::min(least_.second, shape.second)};
    most_ = {std::max(most_.first, shape.first), std::max(most_.second, shape.second)};
  }
  probes_ = std::min(static_cast<std::size_t>(probes), candidates_.size());
}

/// How far a shape is on the way from the smallest to the largest, by n L² on a logarithmic scale.
double ProbePlan::place(const Shape& shape) const {
  const bool batch = kind_ == SizeKind::batch;
  const auto way = [&](const Shape& to) {
    return log_range(least_.first, to.first) +
           (batch ? 2 * log_range(least_.second, to.second) : 0.0);
  };
  return way(shape) / way(most_);
}

/// What was measured at a shape that is not larger; empty if there is nothing more to learn.
std::optional<double> ProbePlan::least_need(const Shape& shape) const {
  double least = 1;
  for (const MemorySample& sample : samples_) {
    const Shape there(static_cast<std::int64_t>(sample.n),
                      static_cast<std::int64_t>(sample.length));
    if (there.first <= shape.first && there.second <= shape.second) {
      if (sample.out_of_memory || there == shape) {
        return std::nullopt;
      }
      least = std::max(least, sample.peak);
    }
  }
  return least;
}

std::optional<ProbePlan::Shape> ProbePlan::next(double limit, double beyond) const {
  if (samples_.empty()) {
    return smallest();
  }
  const bool planned = samples_.size() < probes_;
  // A high floor hides growth, so that each size may be only little larger than the one before. Of
  // one size, twice as many are then measured to reach the largest.
  const bool climbs = kind_ == SizeKind::size && samples_.size() < 2 * probes_;
  if (!planned && !climbs) {
    return std::nullopt;
  }
  constexpr double kRounded = 1e-9;
  const double reach =
      kRounded +
      (planned ? static_cast<double>(samples_.size()) / static_cast<double>(probes_ - 1) : 1.0);
  std::optional<Shape> widest;
  std::optional<Shape> cheapest;
  constexpr double kNothing = -std::numeric_limits<double>::infinity();
  double gap = kNothing;
  double lowest = beyond;
  for (const Shape& shape : candidates_) {
    const auto least = least_need(shape);
    if (!least || (!planned && shape.first <= largest_)) {
      continue;
    }
    const double need = held_ + bound_.at(shape_terms(static_cast<double>(shape.first),
                                                      static_cast<double>(shape.second), kind_));
    if (need > limit) {
      if (need < lowest && planned) {
        lowest = need;
        cheapest = shape;
      }
      continue;
    }
    // Of those that come later, the first; last of all those that show nothing new.
    const double here = need <= (1 + kRounding) * *least ? kNothing
                        : place(shape) <= reach          ? need - *least
                                                         : -place(shape);
    if (!widest || here > gap) {
      gap = here;
      widest = shape;
    }
  }
  if (gap == kNothing) {
    return cheapest || !planned ? cheapest : widest;
  }
  return widest;
}

void ProbePlan::add(const Shape& shape, double peak, double held, bool out_of_memory, double base) {
  const auto n = static_cast<double>(shape.first);
  const auto length = static_cast<double>(shape.second);
  samples_.push_back({n, length, peak, out_of_memory, base});
  held_ = std::max(held_, held);
  if (!out_of_memory) {
    largest_ = std::max(largest_, shape.first);
    bound_.add(shape_terms(n, length, kind_), std::max(peak - held, 1.0));
  }
}

std::optional<ProbePlan::Shape> next_at_the_limit(const MemoryModel& model,
                                                  const std::vector<std::int64_t>& lengths,
                                                  std::int64_t most, double limit, double beyond) {
  const auto fails_alone = [&](std::int64_t length) {
    return std::ranges::any_of(model.samples(), [&](const MemorySample& s) {
      return s.n == 1 && s.length <= static_cast<double>(length) &&
             (s.out_of_memory || s.peak > limit);
    });
  };
  std::optional<ProbePlan::Shape> result;
  double largest = kWorthARun;
  // Longest first: it is chosen if several lengths cannot be used at all.
  for (const std::int64_t whole : std::views::reverse(lengths)) {
    const auto length = static_cast<double>(whole);
    const std::int64_t safe = std::min(model.largest_batch(length, limit), most);
    const std::int64_t reach = std::min(model.largest_batch(length, beyond), most);
    const std::int64_t expected = largest_that_holds(safe, reach + 1, [&](std::int64_t n) {
      return model.peak(static_cast<double>(n), length) <= limit;
    });
    const std::int64_t n = expected == 0 && !fails_alone(whole) ? 1 : expected;
    const double unused = n > safe ? 1 - static_cast<double>(safe) / static_cast<double>(n) : 0.0;
    if (unused > largest) {
      largest = unused;
      result = {n, whole};
    }
  }
  return result;
}

}  // namespace brim::detail
