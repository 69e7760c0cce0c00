#include "predict/phase_fit.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "predict/predict_constants.h"

namespace brim::detail {
namespace {

// Of the samples, the one that a phase passes through counts so much more than those that no phase
// explains yet, and these than the others: each decides only where those before leave a choice.
constexpr double kFirst = 100;

using Terms = NeedBound::Terms;

bool is_constant(const Phase& phase) {
  return std::all_of(phase.begin() + 1, phase.end(), [](double value) { return value == 0; });
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
  NeedBound bound;
  std::vector<std::pair<Terms, double>> measured;
  for (const MemorySample& sample : samples) {
    if (!sample.out_of_memory) {
      measured.emplace_back(shape_terms(sample.n, sample.length, kind), sample.peak);
      bound.add(measured.back().first, sample.peak);
    }
  }
  // What lies above the bound is noise. No phase is made of less than that.
  double noise = kRounding;
  for (auto& [terms, peak] : measured) {
    const double most = bound.at(terms);
    noise = std::max(noise, peak / most - 1);
    peak = std::min(peak, most);
  }
  const auto count = static_cast<double>(measured.size());
  std::vector<Phase> phases;
  const auto add = [&](const Terms& objective, double times) {
    const auto steepest = bound.steepest(objective).phase;
    phases.emplace_back(steepest.begin(), steepest.begin() + term_count(kind));
    std::ranges::for_each(phases.back(), [&](double& x) { x *= times; });
  };
  const auto share = [&](const auto& sample) {
    return peak_of_phases(0, phases, sample.first) / sample.second;
  };
  // Through the sample that is explained least, the phase that comes nearest to the others, those
  // first that are not explained either. Of few terms if that is enough: a constant, the usual
  // ones, or also the rare ones (of a batch what each sample costs whatever its length, and room
  // for one sample at a time, such as the unfolded image of a convolution).
  while (phases.size() < measured.size()) {
    const auto least = std::ranges::min_element(
        measured, {}, [&](const auto& sample) { return std::pair(share(sample), -sample.second); });
    if (!phases.empty() && share(*least) >= 1 - noise) {
      break;
    }
    Terms nearness{};
    for (const auto& [terms, peak] : measured) {
      const double weight = share(std::pair(terms, peak)) < 1 - noise ? kFirst : 1.0;
      const double times = terms == least->first ? kFirst * kFirst : weight / count;
      for (std::size_t j = 0; j < terms.size(); ++j) {
        nearness[j] += times * terms[j] / peak;
      }
    }
    for (const std::size_t terms : {std::size_t{1}, std::size_t{3}, term_count(kind)}) {
      Terms some{};
      std::copy_n(nearness.begin(), terms, some.begin());
      add(some, 1);
      if (share(*least) >= 1 - kRounding || terms == term_count(kind)) {
        break;
      }
      phases.pop_back();
    }
  }
  // They are at most what was measured. Of noise they should be the middle.
  std::vector<double> shares;
  std::ranges::transform(samples, std::back_inserter(shares), [&](const MemorySample& s) {
    return s.out_of_memory ? 0
                           : s.peak / peak_of_phases(0, phases, shape_terms(s.n, s.length, kind));
  });
  std::erase(shares, 0.0);
  const auto middle = shares.begin() + static_cast<std::ptrdiff_t>(shares.size() / 2);
  std::ranges::nth_element(shares, middle);
  for (Phase& phase : phases) {
    std::ranges::for_each(phase, [&](double& x) { x *= *middle; });
  }
  // A phase that reaches what ran out of memory: the one that is least in the way elsewhere. One
  // part in 1e9 more, so that rounding does not leave it below.
  for (const MemorySample& failed : samples) {
    const Terms terms = shape_terms(failed.n, failed.length, kind);
    if (failed.out_of_memory && peak_of_phases(0, phases, terms) < failed.peak) {
      add(terms, failed.peak / bound.at(terms) * (1 + 1e-9));
    }
  }
  // A phase that does not grow is the floor.
  PhaseFit fit;
  for (Phase& phase : phases) {
    if (is_constant(phase)) {
      fit.floor = std::max(fit.floor, phase[0]);
    } else {
      fit.phases.push_back(std::move(phase));
    }
  }
  if (fit.phases.empty()) {
    fit.phases.push_back(Phase(term_count(kind)));
    std::swap(fit.phases.back()[0], fit.floor);
  }
  return fit;
}

}  // namespace brim::detail
