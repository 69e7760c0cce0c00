#include "predict/phase_fit.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "predict/least_squares.h"

namespace brim::detail {
namespace {

// Peaks closer together than this may be of one phase that does not grow: what grows a little there
// (the input itself) is far below it.
constexpr double kFloorSpread = 1.02;
// A larger set of terms must explain the samples this many times better than the smallest one.
constexpr double kPriceOfTerms = 2;
// Two phases that share what is held all the time are likelier than two that do not.
constexpr double kPriceOfTwoBases = 1.25;
// With more samples than this, not every way to divide them is tried. Sizes alone are divided along
// one line only.
constexpr std::size_t kFewBatches = 10;
constexpr std::size_t kFewSizes = 32;
constexpr std::size_t kCutsOfMany = 5;

using Indices = std::vector<std::size_t>;
using Groups = std::vector<Indices>;

/// Which terms a phase may have, the smallest set first.
std::vector<Indices> term_sets(SizeKind kind) {
  if (kind == SizeKind::size) {
    return {{0, 1, 2}};
  }
  // n: what each sample costs whatever its length. L²: room for one sample at a time, such as the
  // unfolded image of a convolution.
  return {{0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2, 5}};
}

bool is_constant(const Phase& phase) {
  return std::all_of(phase.begin() + 1, phase.end(), [](double value) { return value == 0; });
}

/// Fits phases to samples that were measured.
class Fitter {
 public:
  Fitter(std::span<const MemorySample> samples, SizeKind kind) : samples_(samples), kind_(kind) {
    for (const MemorySample& sample : samples) {
      terms_.push_back(shape_terms(sample.n, sample.length, kind));
    }
  }

  [[nodiscard]] PhaseFit best();

 private:
  [[nodiscard]] bool has_many() const {
    return samples_.size() > (kind_ == SizeKind::size ? kFewSizes : kFewBatches);
  }
  [[nodiscard]] std::vector<Phase> phases_on_one_base(const Groups& groups,
                                                      const Indices& terms) const;
  void consider(PhaseFit fit, double price, bool shared_base, bool always);
  [[nodiscard]] std::vector<Groups> partitions(const Indices& rest) const;
  [[nodiscard]] std::vector<std::size_t> floored_counts(const Indices& ascending) const;

  std::span<const MemorySample> samples_;
  std::vector<NeedBound::Terms> terms_;
  SizeKind kind_;
  PhaseFit best_;
  double best_score_ = std::numeric_limits<double>::infinity();
};

/// A phase for each group of samples. They differ in what grows: what is held all the time, weights
/// above all, is the same.
std::vector<Phase> Fitter::phases_on_one_base(const Groups& groups, const Indices& terms) const {
  const std::size_t growing = terms.size() - 1;
  std::size_t rows = 0;
  for (const Indices& group : groups) {
    rows += group.size();
  }
  Matrix a(rows, 1 + groups.size() * growing);
  std::size_t row = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (const std::size_t i : groups[g]) {
      // Divided by the peak itself: an error counts as a share of it.
      a.at(row, 0) = terms_[i][0] / samples_[i].peak;
      for (std::size_t j = 0; j < growing; ++j) {
        a.at(row, 1 + g * growing + j) = terms_[i][terms[1 + j]] / samples_[i].peak;
      }
      ++row;
    }
  }
  constexpr double kNothing = 1e-9;  // a coefficient that adds less to every row is not there
  std::vector<double> x = solve_non_negative(a, std::vector<double>(a.rows, 1.0));
  for (std::size_t j = 0; j < a.columns; ++j) {
    double most = 0;
    for (std::size_t i = 0; i < a.rows; ++i) {
      most = std::max(most, x[j] * a.at(i, j));
    }
    x[j] = most < kNothing ? 0 : x[j];
  }
  std::vector<Phase> phases(groups.size(), Phase(term_count(kind_)));
  for (std::size_t g = 0; g < groups.size(); ++g) {
    phases[g][0] = x[0];
    for (std::size_t j = 0; j < growing; ++j) {
      phases[g][terms[1 + j]] = x[1 + g * growing + j];
    }
  }
  return phases;
}

/// Keeps the fit if it is the best so far by generalised cross-validation: the error at the
/// samples, larger the fewer of them are left over after the coefficients are paid for.
void Fitter::consider(PhaseFit fit, double price, bool shared_base, bool always) {
  std::size_t used = fit.floor > 0 ? 1 : 0;
  for (const Phase& phase : fit.phases) {
    used += static_cast<std::size_t>(
        std::count_if(phase.begin(), phase.end(), [](double value) { return value > 0; }));
  }
  used -= shared_base && fit.phases[0][0] > 0 ? 1 : 0;
  if (used >= samples_.size() && !always) {
    return;  // it would pass through every sample, whatever they are
  }
  double squares = 0;
  for (std::size_t i = 0; i < samples_.size(); ++i) {
    const double error = peak_of_phases(fit.floor, fit.phases, terms_[i]) / samples_[i].peak - 1;
    squares += error * error;
  }
  const auto count = static_cast<double>(samples_.size());
  const double scarcity = count / std::max(count - static_cast<double>(used), 0.5);
  const double score = price * std::sqrt(squares / count + kRounding * kRounding) * scarcity;
  if (score < best_score_) {
    best_score_ = score;
    best_ = std::move(fit);
  }
}

/// How many of the smallest peaks may be the floor.
std::vector<std::size_t> Fitter::floored_counts(const Indices& ascending) const {
  const double least = samples_[ascending.front()].peak;
  std::vector<std::size_t> result{0};
  std::size_t count = 0;
  while (count + 2 < ascending.size() && samples_[ascending[count]].peak <= kFloorSpread * least) {
    ++count;
    result.push_back(count);
  }
  if (has_many() && result.size() > 3) {
    result = {0, 1, count};
  }
  return result;
}

/// All together, and cut in two along the peak, the length, the number and their product: the
/// regions of two phases are divided by a surface that is nearly one of these.
std::vector<Groups> Fitter::partitions(const Indices& rest) const {
  std::vector<Groups> result{{rest}};
  const auto cut_along = [&](const auto& key) {
    std::vector<double> values;
    values.reserve(rest.size());
    for (const std::size_t i : rest) {
      values.push_back(key(samples_[i]));
    }
    std::sort(values.begin(), values.end());
    values.erase(std::unique(values.begin(), values.end()), values.end());
    const std::size_t cuts = values.size() - 1;
    const std::size_t tried = has_many() ? std::min(cuts, kCutsOfMany) : cuts;
    for (std::size_t cut = 0; cut < tried; ++cut) {
      const double least = values[1 + cut * cuts / tried];
      Groups groups(2);
      for (const std::size_t i : rest) {
        groups[key(samples_[i]) < least ? 0 : 1].push_back(i);
      }
      if (groups[0].size() >= 2 && groups[1].size() >= 2 &&
          std::find(result.begin(), result.end(), groups) == result.end()) {
        result.push_back(std::move(groups));
      }
    }
  };
  cut_along([](const MemorySample& sample) { return sample.peak; });
  if (kind_ == SizeKind::batch) {
    cut_along([](const MemorySample& sample) { return sample.length; });
    cut_along([](const MemorySample& sample) { return sample.n; });
    cut_along([](const MemorySample& sample) { return sample.n * sample.length; });
  }
  return result;
}

PhaseFit Fitter::best() {
  Indices ascending(samples_.size());
  std::iota(ascending.begin(), ascending.end(), std::size_t{0});
  std::stable_sort(ascending.begin(), ascending.end(), [&](std::size_t a, std::size_t b) {
    return samples_[a].peak < samples_[b].peak;
  });
  const std::vector<Indices> sets = term_sets(kind_);
  for (const std::size_t floored : floored_counts(ascending)) {
    const double floor = floored > 0 ? samples_[ascending[floored - 1]].peak : 0.0;
    const Indices rest(ascending.begin() + static_cast<std::ptrdiff_t>(floored), ascending.end());
    for (const Groups& groups : partitions(rest)) {
      const bool two = groups.size() == 2;
      for (const Indices& terms : sets) {
        const bool smallest = &terms == &sets.front();
        const double price = smallest ? 1 : kPriceOfTerms;
        PhaseFit apart{floor, {}};
        for (const Indices& group : groups) {
          apart.phases.push_back(phases_on_one_base({group}, terms).front());
        }
        consider(std::move(apart), price * (two ? kPriceOfTwoBases : 1.0), false,
                 floored == 0 && !two && smallest);
        if (two) {
          consider({floor, phases_on_one_base(groups, terms)}, price, true, false);
        }
      }
    }
  }
  // A phase that does not grow is a floor by another name.
  for (const Phase& phase : best_.phases) {
    best_.floor = is_constant(phase) ? std::max(best_.floor, phase[0]) : best_.floor;
  }
  if (!std::all_of(best_.phases.begin(), best_.phases.end(), is_constant)) {
    std::erase_if(best_.phases, is_constant);
  }
  return std::move(best_);
}

/// A phase of one term that reaches the bound, and of those the one that is least above what was
/// measured elsewhere. Larger shapes that fitted are left out: there shapes do not tell the need,
/// and only a constant would be near both, at which nothing fits.
Phase phase_through(const MemorySample& bound, std::span<const MemorySample> measured,
                    SizeKind kind) {
  const auto at_bound = shape_terms(bound.n, bound.length, kind);
  Phase best;
  double least = std::numeric_limits<double>::infinity();
  for (std::size_t j = 3; j-- > 0;) {
    Phase phase(term_count(kind));
    // One part in 1e12 more, so that rounding does not leave it below.
    phase[j] = bound.peak * (1 + 1e-12) / at_bound[j];
    double over = 0;
    for (const MemorySample& sample : measured) {
      if (sample.n < bound.n || sample.length < bound.length) {
        const auto terms = shape_terms(sample.n, sample.length, kind);
        over = std::max(over, phase[j] * terms[j] / sample.peak);
      }
    }
    if (over < least) {
      least = over;
      best = std::move(phase);
    }
  }
  return best;
}

}  // namespace

NeedBound::Terms shape_terms(double n, double length, SizeKind kind) noexcept {
  if (kind == SizeKind::size) {
    return {1, n, n * n};
  }
  return {1, n * length, n * length * length, n, length, length * length};
}

double peak_of_phases(double floor, std::span<const Phase> phases,
                      const NeedBound::Terms& terms) noexcept {
  double result = floor;
  for (const Phase& phase : phases) {
    result = std::max(result, std::inner_product(phase.begin(), phase.end(), terms.begin(), 0.0));
  }
  return result;
}

PhaseFit fit_phases(std::span<const MemorySample> samples, SizeKind kind) {
  std::vector<MemorySample> points;
  std::vector<MemorySample> bounds;
  for (const MemorySample& sample : samples) {
    (sample.out_of_memory ? bounds : points).push_back(sample);
  }
  const std::size_t measured = points.size();
  PhaseFit fit = Fitter(points, kind).best();
  const auto too_low = [&](const MemorySample& bound) {
    return peak_of_phases(fit.floor, fit.phases, shape_terms(bound.n, bound.length, kind)) <
           bound.peak;
  };
  // A bound that the fit does not reach is first taken as a point: the same phases, steeper, often
  // explain both.
  std::copy_if(bounds.begin(), bounds.end(), std::back_inserter(points), too_low);
  if (points.size() > measured) {
    fit = Fitter(points, kind).best();
  }
  for (const MemorySample& bound : bounds) {
    if (too_low(bound)) {
      fit.phases.push_back(phase_through(bound, std::span(points).first(measured), kind));
    }
  }
  return fit;
}

}  // namespace brim::detail
