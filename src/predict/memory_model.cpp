#include <brim/memory/bytes.h>
#include <brim/predict/memory_model.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ranges>
#include <set>
#include <utility>

#include "bisect.h"
#include "check_argument.h"
#include "number_text.h"
#include "predict/phase_fit.h"

namespace brim {
namespace {

using detail::check_argument;
using detail::least_shapes;
using detail::PhaseFit;
using detail::shape_terms;
using detail::text;

constexpr std::size_t kMostRefits = 16;
constexpr double kJump = 2;  // times what shorter samples allow

/// n L² of anything larger could overflow.
void check_magnitude(const char* name, double value) {
  check_argument(value <= 1e100, name, " must be at most 1e100, got ", value);
}

void check_figure(const char* name, double value, std::size_t index) {
  check_argument(std::isfinite(value) && value > 0, name, " must be finite and positive, got ",
                 value, " in sample ", index);
  check_magnitude(name, value);
}

void check_samples(std::span<const MemorySample> samples, SizeKind kind) {
  std::set<std::pair<double, double>> shapes;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    const MemorySample& sample = samples[i];
    check_figure("sizes", sample.n, i);
    if (kind == SizeKind::batch) {
      check_figure("sizes", sample.length, i);
    }
    check_figure("peaks", sample.peak, i);
    check_argument(sample.base >= 0 && sample.base <= sample.peak,
                   "base must be from 0 to the peak of ", sample.peak, ", got ", sample.base,
                   " in sample ", i);
    if (!sample.out_of_memory) {
      shapes.emplace(sample.n, kind == SizeKind::batch ? sample.length : 0.0);
    }
  }
  check_argument(shapes.size() >= least_shapes(kind), "sizes must hold at least ",
                 least_shapes(kind), " different ones that did not run out of memory, got ",
                 shapes.size());
}

/// Each measured sample, predicted without it. Empty where what is left could not be fitted.
std::vector<double> left_out_errors(std::span<const MemorySample> samples, SizeKind kind) {
  const auto measured = static_cast<std::size_t>(std::count_if(
      samples.begin(), samples.end(), [](const MemorySample& s) { return !s.out_of_memory; }));
  if (measured <= least_shapes(kind)) {
    return {};
  }
  const std::size_t refits = std::min(measured, kMostRefits);
  std::vector<double> result(measured);
  for (std::size_t refit = 0; refit < refits; ++refit) {
    std::vector<MemorySample> others;
    std::vector<std::pair<std::size_t, MemorySample>> left_out;
    std::size_t index = 0;  // among the measured ones
    for (const MemorySample& sample : samples) {
      if (sample.out_of_memory || index % refits != refit) {
        others.push_back(sample);
      } else {
        left_out.emplace_back(index, sample);
      }
      index += sample.out_of_memory ? 0 : 1;
    }
    const PhaseFit fit = detail::fit_phases(others, kind);
    for (const auto& [i, sample] : left_out) {
      const auto terms = shape_terms(sample.n, sample.length, kind);
      result[i] = detail::peak_of_phases(fit.floor, fit.phases, terms) / sample.peak - 1;
    }
  }
  return result;
}

ModelError summarise(std::vector<double> each) {
  if (each.empty()) {
    return {};
  }
  std::vector<double> sizes;
  sizes.reserve(each.size());
  for (const double value : each) {
    sizes.push_back(std::abs(value));
  }
  std::sort(sizes.begin(), sizes.end());
  const std::size_t half = sizes.size() / 2;
  const double median = sizes.size() % 2 == 1 ? sizes[half] : (sizes[half - 1] + sizes[half]) / 2;
  return {median, sizes.back(), std::move(each)};
}

std::string percent(double share) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%.1f %%", 100 * share);
  return buffer;
}

std::string bytes_text(double bytes) {
  constexpr double kMost = 9e18;
  if (bytes >= 10) {
    return format_bytes(std::llround(std::min(bytes, kMost)));
  }
  char buffer[32];  // a coefficient may be below a byte: bytes per token times length, for one
  std::snprintf(buffer, sizeof buffer, "%.3g B", bytes);
  return buffer;
}

void check_size(const char* name, double value) {
  check_argument(std::isfinite(value) && value >= 0, name, " must be finite and not negative, got ",
                 value);
  check_magnitude(name, value);
}

/// The largest whole number up to kLargestSize that fits, 0 for none, where all below one that fits
/// do so too. The nearer the guess, the fewer are tried.
template <class Fits>
std::int64_t largest_that_fits(const Fits& fits, double guess) {
  constexpr std::int64_t kMost = MemoryModel::kLargestSize;
  std::int64_t good = 0;
  auto bad =
      static_cast<std::int64_t>(std::clamp(std::floor(guess), 1.0, static_cast<double>(kMost)));
  for (; fits(bad); bad = bad > kMost / 2 ? kMost : 2 * bad) {
    good = bad;
    if (good == kMost) {
      return good;
    }
  }
  while (good == 0 && bad > 1) {
    (fits(bad / 2) ? good : bad) = bad / 2;
  }
  return detail::largest_that_holds(good, bad, fits);
}

}  // namespace

void MemoryModel::fit(std::span<const MemorySample> samples, SizeKind kind, bool with_error) {
  check_samples(samples, kind);
  PhaseFit fit = detail::fit_phases(samples, kind);
  MemoryModelState next;
  next.kind = kind;
  next.floor = fit.floor;
  next.phases = std::move(fit.phases);
  if (with_error) {
    next.error = summarise(left_out_errors(samples, kind));
  }
  next.samples.assign(samples.begin(), samples.end());
  state_ = std::move(next);
  learn();
  // A measurement above what the others allow is noise, or a program of another kind. Such an
  // excess may be larger where nothing was measured. One to more than twice is a jump: from there
  // on the measurement itself holds, and says nothing about what lies before it.
  constexpr double kTimesTheExcess = 1.5;
  double excess = 0;
  for (const MemorySample& sample : state_.samples) {
    excess = std::max(excess, (sample.peak - base_) / bound(sample.n, sample.length) - 1);
  }
  state_.margin = detail::kRounding + kTimesTheExcess * std::min(excess, kJump - 1);
}

void MemoryModel::learn() {
  base_ = std::ranges::min(state_.samples, {}, &MemorySample::base).base;
  envelope_.clear();
  for (const MemorySample& sample : state_.samples) {
    envelope_.push_back(least(sample.n, sample.length));
  }
  std::vector<MemorySample> ascending = state_.samples;
  std::ranges::stable_sort(
      ascending, {}, [](const MemorySample& sample) { return std::pair(sample.length, sample.n); });
  const auto add = [&](NeedBound& bound, const MemorySample& sample) {
    if (!sample.out_of_memory) {
      bound.add(shape_terms(sample.n, sample.length, state_.kind),
                std::max(sample.peak - base_, 1.0));
    }
  };
  // What is held before a jump is held after it too: longer samples bound shorter ones, but not the
  // other way round.
  const auto begin_range = [&](const Jump& jump) {
    ranges_.push_back({jump, {}});
    for (const MemorySample& sample : ascending) {
      if (sample.length >= jump.from) {
        add(ranges_.back().bound, sample);
      }
    }
  };
  ranges_.clear();
  begin_range({});
  NeedBound shorter;                 // from the samples of the range so far
  std::vector<MemorySample> within;  // those of them that others allow
  for (const MemorySample& sample : ascending) {
    const double allowed = shorter.at(shape_terms(sample.n, sample.length, state_.kind));
    if (sample.peak - base_ <= kJump * allowed) {
      if (!sample.out_of_memory) {
        within.push_back(sample);
      }
    } else {
      // Without as many shorter samples that did not jump, their number may be the cause.
      double after = 0;
      for (const MemorySample& other : within) {
        after =
            std::max(after, other.n >= sample.n && other.length < sample.length ? other.length : 0);
      }
      if (after > 0) {
        begin_range({after, sample.length, sample.n});
        shorter = {};
        within = {sample};
      }
    }
    add(shorter, sample);
  }
}

std::vector<MemoryModel::Jump> MemoryModel::jumps() const {
  std::vector<Jump> result;
  for (const Range& range : ranges_ | std::views::drop(1)) {
    result.push_back(range.jump);
  }
  return result;
}

/// The most that any phase can hold beyond base_. The last range alone would say so but for
/// rounding, by which the bound could fall.
double MemoryModel::bound(double n, double length) const {
  double result = 0;
  for (const Range& range : ranges_) {
    if (range.jump.after < length || range.jump.n == 0) {
      result = std::max(result, range.bound.at(shape_terms(n, length, state_.kind)));
    }
  }
  return result;
}

/// What a size that is not larger needed.
double MemoryModel::least(double n, double length) const {
  double result = 0;
  for (const MemorySample& sample : state_.samples) {
    if (sample.n <= n && sample.length <= length) {
      result = std::max(result, sample.peak);
    }
  }
  return result;
}

MemoryModel MemoryModel::from_state(MemoryModelState state) {
  const auto wrong = [](double value) { return !std::isfinite(value) || value < 0; };
  const std::size_t terms = detail::term_count(state.kind);
  bool bad = state.phases.empty() || wrong(state.floor) || wrong(state.margin);
  for (const std::vector<double>& phase : state.phases) {
    bad = bad || phase.size() != terms || std::any_of(phase.begin(), phase.end(), wrong);
  }
  check_argument(!bad, "state is not that of a fitted MemoryModel: floor, margin and the ", terms,
                 " coefficients of each phase must be finite and not negative, and there must be a "
                 "phase");
  check_samples(state.samples, state.kind);
  MemoryModel model;
  model.state_ = std::move(state);
  model.learn();
  return model;
}

void MemoryModel::check(SizeKind kind) const {
  check_argument(fitted(), "this MemoryModel has not been fitted: call fit or probe first");
  check_argument(kind == state_.kind, state_.kind == SizeKind::batch
                                          ? "this model is of batches: give n and length"
                                          : "this model is of one size: give the size alone");
}

void MemoryModel::check(double n, std::optional<double> length) const {
  check(length ? SizeKind::batch : SizeKind::size);
  check_size(length ? "n" : "size", n);
  check_size("length", length.value_or(0));
}

double MemoryModel::peak(double n, std::optional<double> length) const {
  check(n, length);
  const auto terms = shape_terms(n, length.value_or(0), state_.kind);
  return std::min(detail::peak_of_phases(state_.floor, state_.phases, terms),
                  safe(n, length.value_or(0)));
}

double MemoryModel::safe_peak(double n, std::optional<double> length) const {
  check(n, length);
  return safe(n, length.value_or(0));
}

double MemoryModel::peak_of(std::span<const double> lengths) const {
  check(SizeKind::batch);
  if (lengths.empty()) {
    return 0;
  }
  for (const double length : lengths) {
    check_size("lengths", length);
  }
  return peak(static_cast<double>(lengths.size()),
              *std::max_element(lengths.begin(), lengths.end()));
}

double MemoryModel::safe(double n, double length) const {
  double result = base_ + bound(n, length) * (1 + state_.margin);
  // What was measured is known: nothing smaller in both needs more, whatever the margin.
  for (std::size_t i = 0; i < state_.samples.size(); ++i) {
    const MemorySample& sample = state_.samples[i];
    if (!sample.out_of_memory && sample.n >= n && sample.length >= length) {
      result = std::min(result, envelope_[i]);
    }
  }
  return std::max(result, least(n, length));
}

std::int64_t MemoryModel::largest_batch(double length, double bytes) const {
  check(SizeKind::batch);
  check_size("length", length);
  return largest(length, bytes);
}

std::int64_t MemoryModel::largest_size(double bytes) const {
  check(SizeKind::size);
  return largest(0, bytes);
}

std::int64_t MemoryModel::largest(double length, double bytes) const {
  check_argument(bytes >= 0, "budget must be 0 or more, got ", bytes);
  const MemorySample& highest = *std::max_element(
      state_.samples.begin(), state_.samples.end(),
      [](const MemorySample& a, const MemorySample& b) { return a.peak < b.peak; });
  const double guess = highest.n * std::max(highest.length, 1.0) / std::max(length, 1.0);
  return largest_that_fits(
      [&](std::int64_t n) { return safe(static_cast<double>(n), length) <= bytes; }, guess);
}

std::vector<std::string> MemoryModel::term_names(SizeKind kind) {
  if (kind == SizeKind::batch) {
    return {"1", "nL", "nL²", "n", "L", "L²"};
  }
  return {"1", "s", "s²"};
}

std::string MemoryModel::to_string() const {
  if (!fitted()) {
    return "MemoryModel, not fitted";
  }
  const std::vector<std::string> names = term_names(state_.kind);
  std::string result = "peak = max of\n";
  if (state_.floor > 0) {
    result += "  " + bytes_text(state_.floor) + "\n";
  }
  for (const std::vector<double>& phase : state_.phases) {
    std::string sum;
    for (std::size_t j = 0; j < phase.size(); ++j) {
      if (phase[j] > 0) {
        sum += (sum.empty() ? "" : " + ") + bytes_text(phase[j]) + (j == 0 ? "" : " · " + names[j]);
      }
    }
    result += "  " + (sum.empty() ? std::string("0 B") : sum) + "\n";
  }
  const auto bounds = std::count_if(state_.samples.begin(), state_.samples.end(),
                                    [](const MemorySample& s) { return s.out_of_memory; });
  result +=
      "from " + text(state_.samples.size() - static_cast<std::size_t>(bounds)) + " measured sizes" +
      (bounds > 0 ? " and " + text(bounds) + " that ran out of memory" : std::string()) + "\n";
  if (state_.error.each.empty()) {
    result += "error unknown: too few sizes to leave one out";
  } else {
    result += "error without the size itself: median " + percent(state_.error.median) + ", worst " +
              percent(state_.error.worst);
  }
  return result + "\nmargin " + percent(state_.margin);
}

}  // namespace brim
