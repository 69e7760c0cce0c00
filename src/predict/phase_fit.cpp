#include "predict/phase_fit.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <numeric>
#include <utility>

#include "predict/least_squares.h"

namespace brim::detail {
namespace {

// Of a batch, the other terms are rare: n is what each sample costs whatever its length, L and L²
// are room for one sample at a time, such as the unfolded image of a convolution.
constexpr std::size_t kUsualTerms = 3;
// Samples are divided at this many places along each line at most.
constexpr std::size_t kMostCuts = 6;

using Indices = std::vector<std::size_t>;
using Groups = std::vector<Indices>;

bool is_constant(const Phase& phase) {
  return std::all_of(phase.begin() + 1, phase.end(), [](double value) { return value == 0; });
}

/// Fits phases to samples that were measured.
class Fitter {
 public:
  Fitter(std::span<const MemorySample> samples, SizeKind kind) : samples_(samples), kind_(kind) {
    for (const MemorySample& sample : samples) {
      terms_.push_back(shape_terms(sample.n, sample.length, kind));
      bound_.add(terms_.back(), sample.peak);
    }
  }

  /// The smallest peaks may be one phase. The others are one, or two that are divided by a surface
  /// that is nearly one of peak, length, number and their product.
  [[nodiscard]] PhaseFit best() {
    Indices all(samples_.size());
    std::iota(all.begin(), all.end(), std::size_t{0});
    for (const auto& [low, rest] : cut(all, [](const MemorySample& s) { return s.peak; })) {
      consider({low, rest});
      consider_cuts(low, rest, [](const MemorySample& s) { return s.peak; });
      if (kind_ == SizeKind::batch) {
        consider_cuts(low, rest, [](const MemorySample& s) { return s.length; });
        consider_cuts(low, rest, [](const MemorySample& s) { return s.n; });
        consider_cuts(low, rest, [](const MemorySample& s) { return s.n * s.length; });
      }
    }
    // A phase that does not grow is the floor.
    PhaseFit fit;
    for (Phase& phase : best_) {
      if (is_constant(phase)) {
        fit.floor = std::max(fit.floor, phase[0]);
      } else {
        fit.phases.push_back(std::move(phase));
      }
    }
    if (fit.phases.empty()) {
      fit.phases.push_back(Phase(term_count(kind_)));
      std::swap(fit.phases.back()[0], fit.floor);
    }
    return fit;
  }

  /// The steepest phase within all measurements, up to these bytes or down to them.
  [[nodiscard]] Phase phase_through(const NeedBound::Terms& terms, double bytes) const {
    const auto steepest = bound_.steepest(terms);
    Phase phase(steepest.phase.begin(), steepest.phase.begin() + term_count(kind_));
    // One part in 1e9 more, so that rounding does not leave it below.
    std::ranges::for_each(phase, [&](double& x) { x *= bytes / steepest.bytes * (1 + 1e-9); });
    return phase;
  }

 private:
  /// Divides samples in two, those with a lower key first; the first way has none of these.
  template <class Key>
  [[nodiscard]] std::vector<std::pair<Indices, Indices>> cut(const Indices& samples,
                                                             const Key& key) const {
    std::vector<double> values;
    for (const std::size_t i : samples) {
      values.push_back(key(samples_[i]));
    }
    std::sort(values.begin(), values.end());
    values.erase(std::unique(values.begin(), values.end()), values.end());
    const std::size_t cuts = std::min(values.size() - 1, kMostCuts);
    std::vector<std::pair<Indices, Indices>> result{{{}, samples}};
    for (std::size_t c = 0; c < cuts; ++c) {
      const double least = values[1 + c * (values.size() - 1) / cuts];
      auto& [low, high] = result.emplace_back();
      std::partition_copy(samples.begin(), samples.end(), std::back_inserter(low),
                          std::back_inserter(high),
                          [&](std::size_t i) { return key(samples_[i]) < least; });
    }
    return result;
  }

  template <class Key>
  void consider_cuts(const Indices& low, const Indices& rest, const Key& key) {
    for (const auto& [one, other] : cut(rest, key)) {
      consider({low, one, other});
    }
  }

  /// The phase with some of the first `terms` that explains the group: of those within all
  /// measurements the one that comes nearest, moved to the middle of what is noise.
  [[nodiscard]] const Phase& phase_of(const Indices& group, std::size_t terms) {
    const auto [place, is_new] = phases_.try_emplace({group, terms});
    Phase& phase = place->second;
    if (!is_new) {
      return phase;
    }
    NeedBound::Terms nearness{};
    for (const std::size_t i : group) {
      for (std::size_t j = 0; j < terms; ++j) {
        nearness[j] += terms_[i][j] / samples_[i].peak;
      }
    }
    const auto nearest = bound_.steepest(nearness).phase;
    phase.assign(nearest.begin(), nearest.begin() + term_count(kind_));
    Indices used;
    for (std::size_t j = 0; j < phase.size(); ++j) {
      if (phase[j] > 0) {
        used.push_back(j);
      }
    }
    Matrix a(group.size(), used.size());
    for (std::size_t row = 0; row < group.size(); ++row) {
      for (std::size_t j = 0; j < used.size(); ++j) {
        a.at(row, j) = terms_[group[row]][used[j]] / samples_[group[row]].peak;
      }
    }
    const LeastSquares solved = solve_least_squares(a, std::vector<double>(group.size(), 1.0));
    if (solved.rank == used.size() && std::ranges::min(solved.x) >= 0) {
      for (std::size_t j = 0; j < used.size(); ++j) {
        phase[used[j]] = solved.x[j];
      }
    }
    return phase;
  }

  void consider(const Groups& groups) {
    consider(groups, kUsualTerms);
    if (term_count(kind_) > kUsualTerms) {
      consider(groups, term_count(kind_));
    }
  }

  /// Keeps these phases if they are the best so far by generalised cross-validation: the error at
  /// the samples, larger the fewer of them are left over after the coefficients are paid for.
  void consider(const Groups& groups, std::size_t terms) {
    std::vector<Phase> phases;
    std::size_t used = 1;  // what is held all the time, weights above all, is the same in all
    for (const Indices& group : groups) {
      if (!group.empty()) {
        const Phase& phase = phases.emplace_back(phase_of(group, terms));
        std::size_t growing = 0;  // rare terms must explain as much as two usual ones
        for (std::size_t j = 1; j < phase.size(); ++j) {
          growing += phase[j] == 0 ? 0 : j < kUsualTerms ? 1 : 2;
        }
        used += std::max<std::size_t>(growing, 1);
      }
    }
    if (used >= samples_.size() && !best_.empty()) {
      return;  // they pass through every sample, whatever these are
    }
    double squares = 0;
    for (std::size_t i = 0; i < samples_.size(); ++i) {
      const double error = peak_of_phases(0, phases, terms_[i]) / samples_[i].peak - 1;
      squares += error * error;
    }
    const auto count = static_cast<double>(samples_.size());
    const double scarcity = count / std::max(count - static_cast<double>(used), 0.5);
    const double score = std::sqrt(squares / count + kRounding * kRounding) * scarcity;
    if (score < best_score_) {
      best_score_ = score;
      best_ = std::move(phases);
    }
  }

  std::span<const MemorySample> samples_;
  std::vector<NeedBound::Terms> terms_;
  SizeKind kind_;
  NeedBound bound_;
  std::map<std::pair<Indices, std::size_t>, Phase> phases_;  // by group and number of terms
  std::vector<Phase> best_;
  double best_score_ = std::numeric_limits<double>::infinity();
};

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
  std::vector<MemorySample> measured;
  std::ranges::copy_if(samples, std::back_inserter(measured),
                       [](const MemorySample& sample) { return !sample.out_of_memory; });
  Fitter fitter(measured, kind);
  PhaseFit fit = fitter.best();
  // A phase that reaches what ran out of memory: the one that is least in the way elsewhere.
  for (const MemorySample& failed : samples) {
    const auto terms = shape_terms(failed.n, failed.length, kind);
    if (failed.out_of_memory && peak_of_phases(fit.floor, fit.phases, terms) < failed.peak) {
      fit.phases.push_back(fitter.phase_through(terms, failed.peak));
    }
  }
  return fit;
}

}  // namespace brim::detail
