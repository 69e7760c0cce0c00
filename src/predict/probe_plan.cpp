#include "predict/probe_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "check_argument.h"
#include "predict/phase_fit.h"

namespace brim::detail {
namespace {

// A model is trusted beyond the measured range once it predicted the newest peak this well, and
// then with this margin.
constexpr double kConfirmed = 0.25;
// Peaks must have grown by this factor: those at the floor say nothing about what follows.
constexpr double kGrown = 1.5;

double log_range(std::int64_t low, std::int64_t high) {
  return std::log(static_cast<double>(high) / static_cast<double>(low));
}

double log_ratio(std::int64_t value, std::int64_t low, std::int64_t high) {
  return high > low ? log_range(low, value) / log_range(low, high) : 0.0;
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
  targets_ = targets();
  std::reverse(targets_.begin(), targets_.end());
}

/// Where the probes should lie. The corners separate the terms; the places in between, from small
/// to large, find where one phase takes over from another. One lies on the side of many short
/// samples, where the phase of short ones still dominates and their length already matters.
std::vector<ProbePlan::Target> ProbePlan::targets() const {
  std::vector<Target> result;
  if (kind_ == SizeKind::size) {
    for (std::size_t i = 0; i < probes_; ++i) {
      const double place =
          static_cast<double>(i) / static_cast<double>(std::max<std::size_t>(probes_ - 1, 1));
      result.push_back({place, 0});
    }
    return result;
  }
  // In the order of importance, for those who want fewer than all.
  result = {{0, 0},   {1, 1},   {.7, .4}, {0, 1},     {1, 0},
            {.2, .2}, {.5, .8}, {.8, .5}, {.25, .75}, {.75, .25}};
  // More are spread evenly (Roberts' sequence).
  for (double i = 1; result.size() < probes_; ++i) {
    result.push_back({std::fmod(0.7548776662466927 * i, 1), std::fmod(0.5698402909980532 * i, 1)});
  }
  result.resize(probes_);
  // Growing: by n L² on the logarithmic scale.
  std::stable_sort(result.begin(), result.end(), [](const Target& a, const Target& b) {
    return a.n + 2 * a.length < b.n + 2 * b.length;
  });
  return result;
}

ProbePlan::Target ProbePlan::place(const Shape& shape) const {
  return {log_ratio(shape.first, least_.first, most_.first),
          kind_ == SizeKind::batch ? log_ratio(shape.second, least_.second, most_.second) : 0.0};
}

double ProbePlan::cautious_need(const Shape& shape) const {
  const auto n = static_cast<double>(shape.first);
  const auto length = static_cast<double>(shape.second);
  const double most = start_ + bound_.at(shape_terms(n, length, kind_));
  if (!model_) {
    return most;
  }
  const double expected = model_->peak(n, length_of(shape));
  return std::min(most, expected * (1 + std::max(model_->margin(), kConfirmed)));
}

std::optional<double> ProbePlan::length_of(const Shape& shape) const {
  return kind_ == SizeKind::batch ? std::optional(static_cast<double>(shape.second)) : std::nullopt;
}

bool ProbePlan::open(const Shape& shape) const {
  return std::none_of(samples_.begin(), samples_.end(), [&](const MemorySample& sample) {
    const auto n = static_cast<std::int64_t>(sample.n);
    const auto length = static_cast<std::int64_t>(sample.length);
    return sample.out_of_memory ? shape.first >= n && shape.second >= length
                                : shape == Shape(n, length);
  });
}

std::optional<ProbePlan::Shape> ProbePlan::next(double limit, double beyond) {
  const bool planned = samples_.empty() || samples_.size() < probes_;
  if (!planned && !may_climb()) {
    return std::nullopt;
  }
  Target target{1, 1};
  if (!targets_.empty()) {
    target = targets_.back();
    targets_.pop_back();
  }
  if (samples_.empty()) {
    return smallest();
  }
  // The corner of the most may be out of reach, and the candidate nearest to it need not be the one
  // that needs most. Beyond the largest measurement nothing is known.
  const bool most = target.n == 1 && target.length == 1 && kind_ == SizeKind::batch;
  const auto distance_of = [&](const Target& here) {
    return most ? -(here.n * log_range(least_.first, most_.first) +
                    2 * here.length * log_range(least_.second, most_.second))
                : std::hypot(here.n - target.n, here.length - target.length);
  };
  std::optional<Shape> nearest;
  std::optional<Shape> cheapest;
  double least = std::numeric_limits<double>::infinity();
  for (const Shape& shape : candidates_) {
    if (!open(shape)) {
      continue;
    }
    const double need = cautious_need(shape);
    if (const double distance = distance_of(place(shape)); need <= limit && distance < least) {
      least = distance;
      nearest = shape;
    }
    if (need < beyond) {
      beyond = need;
      cheapest = shape;
    }
  }
  if (!planned) {
    return nearest && nearest->first > largest_measured() ? nearest : std::nullopt;
  }
  return nearest ? nearest : cheapest;
}

std::int64_t ProbePlan::largest_measured() const {
  double largest = 0;
  for (const MemorySample& sample : samples_) {
    largest = std::max(largest, sample.out_of_memory ? 0.0 : sample.n);
  }
  return static_cast<std::int64_t>(largest);
}

/// A high floor hides growth, so that each size may be only little larger than the one before. Of
/// one size, twice as many are then measured to reach the largest.
bool ProbePlan::may_climb() const {
  return kind_ == SizeKind::size && samples_.size() < 2 * probes_ &&
         largest_measured() < most_.first;
}

void ProbePlan::add(const Shape& shape, double peak, double start, bool out_of_memory,
                    double base) {
  const auto n = static_cast<double>(shape.first);
  const auto length = static_cast<double>(shape.second);
  samples_.push_back({n, length, peak, out_of_memory, base});
  start_ = std::max(start_, start);
  if (!out_of_memory) {
    bound_.add(shape_terms(n, length, kind_), std::max(peak - start, 1.0));
  }
  std::size_t measured = 0;
  double lowest = std::numeric_limits<double>::infinity();
  double highest = 0;
  for (const MemorySample& sample : samples_) {
    if (!sample.out_of_memory) {
      ++measured;
      lowest = std::min(lowest, sample.peak);
      highest = std::max(highest, sample.peak);
    }
  }
  if (measured <= least_shapes(kind_) || highest < kGrown * lowest) {
    return;
  }
  // Check whether a fit without this size would have predicted it.
  const std::vector<MemorySample> earlier(samples_.begin(), samples_.end() - 1);
  MemoryModel before;
  before.fit(earlier, kind_, false);
  const double predicted = before.peak(n, length_of(shape));
  const bool confirmed = !out_of_memory && std::abs(predicted / peak - 1) <= kConfirmed;
  model_.reset();
  if (confirmed) {
    model_.emplace();
    model_->fit(samples_, kind_, false);
  }
}

}  // namespace brim::detail
