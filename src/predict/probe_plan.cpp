#include "predict/probe_plan.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "number_text.h"
#include "predict/phase_fit.h"

namespace brim::detail {
namespace {

// A model is believed beyond what was measured once it told the newest peak this well, and then
// with as much on top.
constexpr double kConfirmed = 0.25;
// It must have seen growth: peaks at the floor say nothing about what comes after it.
constexpr double kGrown = 1.5;

std::size_t least_probes(SizeKind kind) { return kind == SizeKind::batch ? 3 : 2; }

double log_range(std::int64_t low, std::int64_t high) {
  return std::log(static_cast<double>(high) / static_cast<double>(low));
}

double log_ratio(std::int64_t value, std::int64_t low, std::int64_t high) {
  return high > low ? std::log(static_cast<double>(value) / static_cast<double>(low)) /
                          std::log(static_cast<double>(high) / static_cast<double>(low))
                    : 0.0;
}

}  // namespace

ProbePlan::ProbePlan(std::vector<Shape> candidates, SizeKind kind, std::int64_t probes)
    : candidates_(std::move(candidates)), kind_(kind) {
  const auto least = static_cast<std::int64_t>(least_probes(kind));
  if (probes < least) {
    throw std::invalid_argument("probes must be " + text(least) + " or more, got " + text(probes));
  }
  for (const Shape& shape : candidates_) {
    const std::int64_t wrong = shape.first < 1 ? shape.first : shape.second;
    if (shape.first < 1 || (kind == SizeKind::batch && shape.second < 1)) {
      throw std::invalid_argument("sizes must be positive, got " + text(wrong));
    }
  }
  std::sort(candidates_.begin(), candidates_.end(), [](const Shape& a, const Shape& b) {
    const auto cost = [](const Shape& shape) {
      return static_cast<double>(shape.first) * std::max(1.0, static_cast<double>(shape.second));
    };
    return std::pair(cost(a), a) < std::pair(cost(b), b);
  });
  candidates_.erase(std::unique(candidates_.begin(), candidates_.end()), candidates_.end());
  if (candidates_.size() < least_probes(kind)) {
    throw std::invalid_argument("sizes must hold at least " + text(least) +
                                " different ones for a fit, got " + text(candidates_.size()));
  }
  least_ = most_ = candidates_.front();
  for (const Shape& shape : candidates_) {
    least_ = {std::min(least_.first, shape.first), std::min(least_.second, shape.second)};
    most_ = {std::max(most_.first, shape.first), std::max(most_.second, shape.second)};
  }
  probes_ = std::min(static_cast<std::size_t>(probes), candidates_.size());
  targets_ = targets();
  std::reverse(targets_.begin(), targets_.end());
}

/// Where the probes should lie. The corners tell the terms apart; the places from small to large
/// between them find where one phase takes over from another. One lies on the side of many short
/// samples, where the phase of short ones still rules and their length already shows.
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
  constexpr std::array<Target, 10> kPlaces{{{0, 0},
                                            {1, 1},
                                            {.7, .4},
                                            {0, 1},
                                            {1, 0},
                                            {.2, .2},
                                            {.5, .8},
                                            {.8, .5},
                                            {.25, .75},
                                            {.75, .25}}};
  result.assign(kPlaces.begin(),
                kPlaces.begin() + static_cast<std::ptrdiff_t>(std::min(probes_, kPlaces.size())));
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

/// From any measured size: no term grows faster than the fastest, so neither does their sum, nor a
/// maximum of such sums. What was held before does not grow at all.
double ProbePlan::most_needed(const Shape& shape) const {
  const bool batch = kind_ == SizeKind::batch;
  const auto terms =
      shape_terms(static_cast<double>(shape.first), static_cast<double>(shape.second), batch);
  double least = std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < samples_.size(); ++i) {
    if (samples_[i].out_of_memory) {
      continue;
    }
    const auto from = shape_terms(samples_[i].n, samples_[i].length, batch);
    double growth = 1;
    for (std::size_t j = 0; j < term_count(batch); ++j) {
      growth = std::max(growth, terms[j] / from[j]);
    }
    least = std::min(least, bases_[i] + growth * (samples_[i].peak - bases_[i]));
  }
  return least;
}

double ProbePlan::cautious_need(const Shape& shape) const {
  const double most = most_needed(shape);
  if (!model_) {
    return most;
  }
  const auto n = static_cast<double>(shape.first);
  const double expected = kind_ == SizeKind::batch
                              ? model_->peak(n, static_cast<double>(shape.second))
                              : model_->peak(n);
  return std::min(most, expected * (1 + std::max(model_->margin(), kConfirmed)));
}

bool ProbePlan::open(const Shape& shape) const {
  return std::none_of(samples_.begin(), samples_.end(), [&](const MemorySample& sample) {
    const auto n = static_cast<std::int64_t>(sample.n);
    const auto length = static_cast<std::int64_t>(sample.length);
    return sample.out_of_memory ? shape.first >= n && shape.second >= length
                                : shape == Shape(n, length);
  });
}

/// For more probes than there are places: where the nearest measured size is farthest away.
ProbePlan::Target ProbePlan::farthest() const {
  Target best{1, 1};
  double most = -1;
  for (const Shape& shape : candidates_) {
    const Target here = place(shape);
    double distance = std::numeric_limits<double>::infinity();
    for (const MemorySample& sample : samples_) {
      const Target there =
          place({static_cast<std::int64_t>(sample.n), static_cast<std::int64_t>(sample.length)});
      distance = std::min(distance, std::hypot(here.n - there.n, here.length - there.length));
    }
    if (distance > most) {
      most = distance;
      best = here;
    }
  }
  return best;
}

std::optional<ProbePlan::Shape> ProbePlan::smallest_step(double beyond) const {
  std::optional<Shape> best;
  for (const Shape& shape : candidates_) {
    const double need = open(shape) ? cautious_need(shape) : beyond;
    if (need < beyond) {
      beyond = need;
      best = shape;
    }
  }
  return best;
}

std::optional<ProbePlan::Shape> ProbePlan::next(double limit, double beyond) {
  if (samples_.empty()) {
    targets_.pop_back();
    return smallest();
  }
  if (samples_.size() >= probes_) {
    return std::nullopt;
  }
  Target target{};
  if (targets_.empty()) {
    target = farthest();
  } else {
    target = targets_.back();
    targets_.pop_back();
  }
  const auto allowed = [&](const Shape& shape) {
    return open(shape) && cautious_need(shape) <= limit;
  };
  const std::optional<Shape> found = nearest(target, allowed);
  return found ? found : smallest_step(beyond);
}

std::optional<ProbePlan::Shape> ProbePlan::nearest(
    const Target& target, const std::function<bool(const Shape&)>& allowed) const {
  // The corner of the most may be out of reach, and what lies nearest to it then need not be what
  // needs most. Beyond the largest that was measured, nothing is known.
  const bool most = target.n == 1 && target.length == 1 && kind_ == SizeKind::batch;
  const auto distance_of = [&](const Target& here) {
    return most ? -(here.n * log_range(least_.first, most_.first) +
                    2 * here.length * log_range(least_.second, most_.second))
                : std::hypot(here.n - target.n, here.length - target.length);
  };
  std::optional<Shape> best;
  double least = std::numeric_limits<double>::infinity();
  for (const Shape& shape : candidates_) {
    const double distance = distance_of(place(shape));
    if (distance < least && allowed(shape)) {
      least = distance;
      best = shape;
    }
  }
  return best;
}

void ProbePlan::add(const Shape& shape, double peak, double base, bool out_of_memory) {
  const auto n = static_cast<double>(shape.first);
  const auto length = static_cast<double>(shape.second);
  samples_.push_back({n, length, peak, out_of_memory});
  bases_.push_back(base);
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
  if (measured <= least_probes(kind_) || highest < kGrown * lowest) {
    return;
  }
  // Check whether a fit without this size would have predicted it.
  const std::vector<MemorySample> earlier(samples_.begin(), samples_.end() - 1);
  MemoryModel before;
  before.fit(earlier, kind_, false);
  const double told = kind_ == SizeKind::batch ? before.peak(n, length) : before.peak(n);
  const bool confirmed = !out_of_memory && std::abs(told / peak - 1) <= kConfirmed;
  model_.reset();
  if (confirmed) {
    model_.emplace();
    model_->fit(samples_, kind_, false);
  }
}

}  // namespace brim::detail
