#include "predict/probe_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "check_argument.h"
#include "predict/phase_fit.h"

namespace brim::detail {
namespace {

// A gain that is less than this share is not worth one of the further measurements.
constexpr double kUnused = 0.03;

double log_range(std::int64_t low, std::int64_t high) {
  return std::log(static_cast<double>(high) / static_cast<double>(low));
}

}  // namespace

ProbePlan::ProbePlan(std::vector<Shape> candidates, SizeKind kind, std::int64_t probes,
                     std::size_t more)
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
  // A high floor hides growth, so that each size may be only little larger than the one before.
  more_ = kind == SizeKind::size ? probes_ : more;
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

/// One sample that is longer than all that fit: the longest, and from the first that is too long on
/// one of medium length. So a sample is left out only if one was measured to be too long, and goes
/// into a batch only if one as long fitted.
std::optional<ProbePlan::Shape> ProbePlan::next_alone(double limit) const {
  double fits = 0;
  for (const MemorySample& sample : samples_) {
    const bool is_over = sample.out_of_memory || sample.peak > limit;
    fits = is_over ? fits : std::max(fits, sample.length);
  }
  std::vector<Shape> open;
  bool fails = false;
  for (const Shape& shape : candidates_) {
    if (kind_ == SizeKind::batch && shape.first == 1 && static_cast<double>(shape.second) > fits) {
      const auto least = least_need(shape);
      const bool is_open = least && *least <= limit;
      fails = fails || !is_open;
      if (is_open) {
        open.push_back(shape);
      }
    }
  }
  if (open.empty()) {
    return std::nullopt;
  }
  return fails ? open[open.size() / 2] : open.back();
}

std::optional<ProbePlan::Shape> ProbePlan::next(double limit, double beyond) const {
  if (samples_.empty()) {
    return smallest();
  }
  const bool planned = samples_.size() < probes_;
  if (samples_.size() >= probes_ + more_) {
    return std::nullopt;
  }
  if (const auto shape = planned ? std::nullopt : next_alone(limit)) {
    return shape;
  }
  constexpr double kRounded = 1e-9;
  const double reach =
      kRounded +
      (planned ? static_cast<double>(samples_.size()) / static_cast<double>(probes_ - 1) : 1.0);
  std::optional<Shape> widest;
  std::optional<Shape> cheapest;
  constexpr double kNothing = -std::numeric_limits<double>::infinity();
  double gap = kNothing;
  double lowest = std::numeric_limits<double>::infinity();
  for (const Shape& shape : candidates_) {
    const auto least = least_need(shape);
    if (!least || (!planned && kind_ == SizeKind::size && shape.first <= largest_)) {
      continue;
    }
    const auto n = static_cast<double>(shape.first);
    const auto length = static_cast<double>(shape.second);
    const double need =
        model_ ? model_->safe_peak(n, length) : held_ + bound_.at(shape_terms(n, length, kind_));
    const double expected = model_ ? std::max(model_->peak(n, length), *least) : *least;
    const bool is_within =
        need <= limit || (model_ && need <= beyond && (1 + kUnused) * expected <= limit);
    if (!is_within) {
      const bool alone = more_ > 0 && kind_ == SizeKind::batch && shape.first == 1;
      if (need < lowest && ((need < beyond && (planned || model_)) || alone)) {
        lowest = need;
        cheapest = shape;
      }
      continue;
    }
    // Of those that come later, the first; last of all those that show nothing new.
    const bool is_new = need > (1 + (model_ ? kUnused : kRounding)) * expected;
    const double here = !is_new                 ? kNothing
                        : place(shape) <= reach ? need - expected
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
  const auto measured = std::ranges::count(samples_, false, &MemorySample::out_of_memory);
  if (kind_ == SizeKind::batch && more_ > 0 && samples_.size() >= probes_ &&
      std::cmp_greater_equal(measured, least_shapes(kind_))) {
    model_.emplace().fit(samples_, kind_, false);
  }
}

}  // namespace brim::detail
