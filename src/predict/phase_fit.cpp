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
// A larger set of terms must explain the points this many times better than the next smaller one.
constexpr double kPriceOfTerms = 2;
// Two phases that share what is held all the time are likelier than two that do not.
constexpr double kPriceOfTwoBases = 1.25;
// With more points than this, not every way to divide them is tried.
constexpr std::size_t kFewPoints = 10;
constexpr std::size_t kCutsOfMany = 5;

using Indices = std::vector<std::size_t>;

/// Which terms a phase may have, and how many times better they must explain the points than the
/// first set.
struct TermSet {
  Indices terms;
  double price;
};

const std::vector<TermSet>& term_sets(bool batch) {
  // n: what each sample costs whatever its length. L²: room for one sample at a time, such as the
  // unfolded image of a convolution.
  static const std::vector<TermSet> of_batch{
      {{0, 1, 2}, 1}, {{0, 1, 2, 3}, kPriceOfTerms}, {{0, 1, 2, 5}, kPriceOfTerms}};
  static const std::vector<TermSet> of_size{{{0, 1, 2}, 1}};
  return batch ? of_batch : of_size;
}

struct Fitted {
  PhaseFit fit;
  double score = std::numeric_limits<double>::infinity();
};

std::size_t coefficients(const PhaseFit& fit) {
  std::size_t count = fit.floor > 0 ? 1 : 0;
  for (const Phase& phase : fit.phases) {
    count += static_cast<std::size_t>(
        std::count_if(phase.begin(), phase.end(), [](double value) { return value > 0; }));
  }
  return count;
}

bool is_constant(const Phase& phase) {
  return std::all_of(phase.begin() + 1, phase.end(), [](double value) { return value == 0; });
}

/// Solves for the share 1 of every row. A coefficient that adds less than rounding to each of them
/// is not there.
std::vector<double> solve_shares(const Matrix& a) {
  constexpr double kNothing = 1e-9;
  std::vector<double> x = solve_non_negative(a, std::vector<double>(a.rows, 1.0));
  for (std::size_t j = 0; j < a.columns; ++j) {
    double most = 0;
    for (std::size_t i = 0; i < a.rows; ++i) {
      most = std::max(most, x[j] * a.at(i, j));
    }
    if (most < kNothing) {
      x[j] = 0;
    }
  }
  return x;
}

class Fitter {
 public:
  Fitter(std::span<const ShapePoint> points, bool batch) : points_(points), batch_(batch) {
    terms_.reserve(points.size());
    for (const ShapePoint& point : points) {
      terms_.push_back(shape_terms(point.n, point.length, batch));
    }
  }

  [[nodiscard]] PhaseFit best() const;

 private:
  [[nodiscard]] Phase phase_of(const Indices& points, const Indices& terms) const;
  [[nodiscard]] std::vector<Phase> phases_on_one_base(const std::vector<Indices>& groups,
                                                      const Indices& terms) const;
  [[nodiscard]] double score(const PhaseFit& fit, std::size_t used) const;
  void consider(PhaseFit fit, std::size_t used, double price, bool always, Fitted& best) const;
  [[nodiscard]] std::vector<std::vector<Indices>> partitions(const Indices& rest) const;
  [[nodiscard]] std::vector<std::size_t> floored_counts(const Indices& ascending) const;

  std::span<const ShapePoint> points_;
  std::vector<std::array<double, kMostTerms>> terms_;
  bool batch_;
};

Phase Fitter::phase_of(const Indices& points, const Indices& terms) const {
  Matrix a(points.size(), terms.size());
  for (std::size_t i = 0; i < points.size(); ++i) {
    // Divided by the need itself: an error counts as a share of it.
    for (std::size_t j = 0; j < terms.size(); ++j) {
      a.at(i, j) = terms_[points[i]][terms[j]] / points_[points[i]].bytes;
    }
  }
  const std::vector<double> x = solve_shares(a);
  Phase phase{};
  for (std::size_t j = 0; j < terms.size(); ++j) {
    phase[terms[j]] = x[j];
  }
  return phase;
}

/// Generalised cross-validation: the error at the points, larger the fewer of them are left over
/// after the coefficients are paid for.
double Fitter::score(const PhaseFit& fit, std::size_t used) const {
  double squares = 0;
  for (const ShapePoint& point : points_) {
    const double error = fit.peak(point.n, point.length, batch_) / point.bytes - 1;
    squares += error * error;
  }
  const auto count = static_cast<double>(points_.size());
  const double scarcity = count / std::max(count - static_cast<double>(used), 0.5);
  return std::sqrt(squares / count + kRounding * kRounding) * scarcity;
}

/// Two phases that differ in what grows: what is held all the time, weights above all, is the same.
std::vector<Phase> Fitter::phases_on_one_base(const std::vector<Indices>& groups,
                                              const Indices& terms) const {
  const std::size_t growing = terms.size() - 1;
  Matrix a(groups[0].size() + groups[1].size(), 1 + 2 * growing);
  std::size_t row = 0;
  for (std::size_t g = 0; g < 2; ++g) {
    for (const std::size_t i : groups[g]) {
      a.at(row, 0) = terms_[i][0] / points_[i].bytes;
      for (std::size_t j = 0; j < growing; ++j) {
        a.at(row, 1 + g * growing + j) = terms_[i][terms[1 + j]] / points_[i].bytes;
      }
      ++row;
    }
  }
  const std::vector<double> x = solve_shares(a);
  std::vector<Phase> phases(2, Phase{});
  for (std::size_t g = 0; g < 2; ++g) {
    phases[g][0] = x[0];
    for (std::size_t j = 0; j < growing; ++j) {
      phases[g][terms[1 + j]] = x[1 + g * growing + j];
    }
  }
  return phases;
}

void Fitter::consider(PhaseFit fit, std::size_t used, double price, bool always,
                      Fitted& best) const {
  if (used >= points_.size() && !always) {
    return;  // it would pass through every point, whatever they are
  }
  const double found = price * score(fit, used);
  if (found < best.score) {
    best = {std::move(fit), found};
  }
}

std::vector<std::size_t> Fitter::floored_counts(const Indices& ascending) const {
  const double least = points_[ascending.front()].bytes;
  std::vector<std::size_t> result{0};
  std::size_t count = 0;
  while (count + 2 < ascending.size() && points_[ascending[count]].bytes <= kFloorSpread * least) {
    ++count;
    result.push_back(count);
  }
  if (points_.size() > kFewPoints && result.size() > 3) {
    result = {0, 1, count};
  }
  return result;
}

/// All together, and cut in two along the need, the length, the number and their product: the
/// regions of two phases are divided by a surface that is nearly one of these.
std::vector<std::vector<Indices>> Fitter::partitions(const Indices& rest) const {
  std::vector<std::vector<Indices>> result{{rest}};
  const auto cut_along = [&](const auto& key) {
    std::vector<double> values;
    values.reserve(rest.size());
    for (const std::size_t i : rest) {
      values.push_back(key(points_[i]));
    }
    std::sort(values.begin(), values.end());
    values.erase(std::unique(values.begin(), values.end()), values.end());
    const std::size_t cuts = values.size() - 1;
    const std::size_t tried = points_.size() > kFewPoints ? std::min(cuts, kCutsOfMany) : cuts;
    for (std::size_t cut = 0; cut < tried; ++cut) {
      const double least = values[1 + cut * cuts / tried];
      std::vector<Indices> groups(2);
      for (const std::size_t i : rest) {
        groups[key(points_[i]) < least ? 0 : 1].push_back(i);
      }
      if (groups[0].size() >= 2 && groups[1].size() >= 2 &&
          std::find(result.begin(), result.end(), groups) == result.end()) {
        result.push_back(std::move(groups));
      }
    }
  };
  cut_along([](const ShapePoint& point) { return point.bytes; });
  if (batch_) {
    cut_along([](const ShapePoint& point) { return point.length; });
    cut_along([](const ShapePoint& point) { return point.n; });
    cut_along([](const ShapePoint& point) { return point.n * point.length; });
  }
  return result;
}

PhaseFit Fitter::best() const {
  Indices ascending(points_.size());
  std::iota(ascending.begin(), ascending.end(), std::size_t{0});
  std::stable_sort(ascending.begin(), ascending.end(), [&](std::size_t a, std::size_t b) {
    return points_[a].bytes < points_[b].bytes;
  });
  Fitted best;
  for (const std::size_t floored : floored_counts(ascending)) {
    const double floor = floored > 0 ? points_[ascending[floored - 1]].bytes : 0.0;
    const Indices rest(ascending.begin() + static_cast<std::ptrdiff_t>(floored), ascending.end());
    for (const auto& groups : partitions(rest)) {
      for (const auto& [terms, price] : term_sets(batch_)) {
        const bool simplest = floored == 0 && groups.size() == 1 && price == 1;
        PhaseFit fit{floor, {}};
        for (const Indices& group : groups) {
          fit.phases.push_back(phase_of(group, terms));
        }
        const std::size_t used = coefficients(fit);
        const double bases = groups.size() == 2 ? kPriceOfTwoBases : 1.0;
        consider(std::move(fit), used, price * bases, simplest, best);
        if (groups.size() == 2) {
          PhaseFit on_one_base{floor, phases_on_one_base(groups, terms)};
          const std::size_t shared = on_one_base.phases[0][0] > 0 ? 1 : 0;
          const std::size_t counted = coefficients(on_one_base) - shared;
          consider(std::move(on_one_base), counted, price, false, best);
        }
      }
    }
  }
  // A phase that does not grow is a floor by another name.
  for (const Phase& phase : best.fit.phases) {
    if (is_constant(phase)) {
      best.fit.floor = std::max(best.fit.floor, phase[0]);
    }
  }
  if (!std::all_of(best.fit.phases.begin(), best.fit.phases.end(), is_constant)) {
    std::erase_if(best.fit.phases, is_constant);
  }
  return best.fit;
}

/// A phase of one term that reaches the bound, and of those the one that is least above what was
/// measured elsewhere.
Phase phase_through(const ShapePoint& bound, std::span<const ShapePoint> points, bool batch) {
  const auto at_bound = shape_terms(bound.n, bound.length, batch);
  Phase best{};
  double least = std::numeric_limits<double>::infinity();
  for (std::size_t j = 0; j < 3; ++j) {
    Phase phase{};
    // One part in 1e12 more, so that rounding does not leave it below.
    phase[j] = bound.bytes * (1 + 1e-12) / at_bound[j];
    double over = 0;
    for (const ShapePoint& point : points) {
      over = std::max(over, phase[j] * shape_terms(point.n, point.length, batch)[j] / point.bytes);
    }
    if (over < least) {
      least = over;
      best = phase;
    }
  }
  return best;
}

}  // namespace

std::array<double, kMostTerms> shape_terms(double n, double length, bool batch) noexcept {
  if (!batch) {
    return {1, n, n * n, 0, 0, 0};
  }
  return {1, n * length, n * length * length, n, length, length * length};
}

double PhaseFit::peak(double n, double length, bool batch) const noexcept {
  const auto terms = shape_terms(n, length, batch);
  double result = floor;
  for (const Phase& phase : phases) {
    result = std::max(result, std::inner_product(phase.begin(), phase.end(), terms.begin(), 0.0));
  }
  return result;
}

PhaseFit fit_phases(std::span<const ShapePoint> points, std::span<const ShapePoint> bounds,
                    bool batch) {
  PhaseFit fit = Fitter(points, batch).best();
  const auto too_low = [&](const ShapePoint& bound) {
    return fit.peak(bound.n, bound.length, batch) < bound.bytes;
  };
  // A bound that the points alone do not reach is first taken as a point: the same phases, steeper,
  // often explain both.
  std::vector<ShapePoint> more(points.begin(), points.end());
  std::copy_if(bounds.begin(), bounds.end(), std::back_inserter(more), too_low);
  if (more.size() > points.size()) {
    fit = Fitter(more, batch).best();
  }
  for (const ShapePoint& bound : bounds) {
    if (too_low(bound)) {
      fit.phases.push_back(phase_through(bound, points, batch));
    }
  }
  return fit;
}

}  // namespace brim::detail
