#include <brim/memory/bytes.h>
#include <brim/predict/memory_model.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <set>
#include <stdexcept>
#include <utility>

#include "number_text.h"
#include "predict/phase_fit.h"

namespace brim {
namespace {

using detail::PhaseFit;
using detail::ShapePoint;
using detail::text;

constexpr std::size_t kMostRefits = 32;

std::size_t least_shapes(SizeKind kind) { return kind == SizeKind::batch ? 3 : 2; }

struct Points {
  std::vector<ShapePoint> measured;
  std::vector<ShapePoint> bounds;
};

void check_figure(const char* name, double value, std::size_t index) {
  if (!std::isfinite(value) || value <= 0) {
    throw std::invalid_argument(std::string(name) + " must be finite and positive, got " +
                                text(value) + " in sample " + text(index));
  }
}

Points points_of(std::span<const MemorySample> samples, SizeKind kind) {
  Points result;
  std::set<std::pair<double, double>> shapes;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    const MemorySample& sample = samples[i];
    check_figure("sizes", sample.n, i);
    if (kind == SizeKind::batch) {
      check_figure("sizes", sample.length, i);
    }
    check_figure("peaks", sample.peak, i);
    const ShapePoint point{sample.n, sample.length, sample.peak};
    (sample.out_of_memory ? result.bounds : result.measured).push_back(point);
    if (!sample.out_of_memory) {
      shapes.emplace(sample.n, kind == SizeKind::batch ? sample.length : 0.0);
    }
  }
  if (shapes.size() < least_shapes(kind)) {
    throw std::invalid_argument("sizes must hold at least " + text(least_shapes(kind)) +
                                " different ones that did not run out of memory, got " +
                                text(shapes.size()));
  }
  return result;
}

/// Each measured sample, predicted without it. Empty where what is left could not be fitted.
std::vector<double> left_out_errors(const Points& points, SizeKind kind) {
  const bool batch = kind == SizeKind::batch;
  const std::size_t count = points.measured.size();
  if (count <= least_shapes(kind)) {
    return {};
  }
  const std::size_t refits = std::min(count, kMostRefits);
  std::vector<double> result(count);
  for (std::size_t refit = 0; refit < refits; ++refit) {
    std::vector<ShapePoint> others;
    others.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
      if (i % refits != refit) {
        others.push_back(points.measured[i]);
      }
    }
    const PhaseFit fit = detail::fit_phases(others, points.bounds, batch);
    for (std::size_t i = refit; i < count; i += refits) {
      const ShapePoint& point = points.measured[i];
      result[i] = fit.peak(point.n, point.length, batch) / point.bytes - 1;
    }
  }
  return result;
}

double median_of(std::vector<double> values) {
  if (values.empty()) {
    return 0;
  }
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

ModelError summarise(std::vector<double> each) {
  ModelError error;
  std::vector<double> sizes;
  sizes.reserve(each.size());
  for (const double value : each) {
    sizes.push_back(std::abs(value));
    error.worst = std::max(error.worst, sizes.back());
  }
  error.median = median_of(std::move(sizes));
  error.each = std::move(each);
  return error;
}

// Errors count as shares of the peak, but of no less than this share of the largest that was
// measured. Small sizes jump, where kernels are chosen by shape, and what matters of that beside a
// budget is the bytes.
constexpr double kSmall = 0.3;

double reference_of(std::span<const MemorySample> samples) {
  double largest = 0;
  for (const MemorySample& sample : samples) {
    largest = std::max(largest, sample.out_of_memory ? 0.0 : sample.peak);
  }
  return kSmall * largest;
}

/// How much more than predicted to allow for. From generalised cross-validation rather than from
/// the plain leave-one-out errors: of seven samples each is needed to tell the phases apart, and
/// what a fit without it lacks says little of the fit with it (docs/predict.md has the figures).
double margin_from(const Points& points, const PhaseFit& fit, double reference, SizeKind kind) {
  constexpr double kTimesTheError = 4;
  double lacking = 0;
  double squares = 0;
  for (const ShapePoint& point : points.measured) {
    const double expected = fit.peak(point.n, point.length, kind == SizeKind::batch);
    const double error = (point.bytes - expected) / std::max(expected, reference);
    lacking = std::max(lacking, error);
    squares += error * error;
  }
  const double mean = squares / static_cast<double>(points.measured.size());
  const double rms = std::sqrt(mean + detail::kRounding * detail::kRounding);
  return std::max(lacking, kTimesTheError * rms * fit.scarcity);
}

std::string percent(double share) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%.1f %%", 100 * share);
  return buffer;
}

std::string bytes_text(double bytes) {
  // A coefficient may be below a byte: bytes a token times length, for one.
  if (bytes < 10) {
    char buffer[32];
    std::snprintf(buffer, sizeof buffer, "%.3g B", bytes);
    return buffer;
  }
  constexpr double kMost = 9e18;
  return format_bytes(std::llround(std::min(bytes, kMost)));
}

void check_argument(const char* name, double value) {
  if (!std::isfinite(value) || value < 0) {
    throw std::invalid_argument(std::string(name) + " must be finite and not negative, got " +
                                text(value));
  }
}

}  // namespace

void MemoryModel::fit(std::span<const MemorySample> samples, SizeKind kind) {
  const Points points = points_of(samples, kind);
  const bool batch = kind == SizeKind::batch;
  const PhaseFit fit = detail::fit_phases(points.measured, points.bounds, batch);
  MemoryModelState next;
  next.kind = kind;
  next.floor = fit.floor;
  next.phases.reserve(fit.phases.size());
  for (const detail::Phase& phase : fit.phases) {
    next.phases.emplace_back(
        phase.begin(), phase.begin() + static_cast<std::ptrdiff_t>(detail::term_count(batch)));
  }
  next.error = summarise(left_out_errors(points, kind));
  next.samples.assign(samples.begin(), samples.end());
  reference_ = reference_of(next.samples);
  next.margin = margin_from(points, fit, reference_, kind);
  state_ = std::move(next);
}

MemoryModel MemoryModel::from_state(MemoryModelState state) {
  const auto wrong = [](double value) { return !std::isfinite(value) || value < 0; };
  const std::size_t terms = detail::term_count(state.kind == SizeKind::batch);
  bool bad = state.phases.empty() || wrong(state.floor) || wrong(state.margin);
  for (const std::vector<double>& phase : state.phases) {
    bad = bad || phase.size() != terms || std::any_of(phase.begin(), phase.end(), wrong);
  }
  if (bad) {
    throw std::invalid_argument(
        "state is not that of a fitted MemoryModel: floor, margin and the " + text(terms) +
        " coefficients of each phase must be finite and not negative, and there must be a phase");
  }
  MemoryModel model;
  model.reference_ = reference_of(state.samples);
  model.state_ = std::move(state);
  return model;
}

void MemoryModel::check(SizeKind kind) const {
  if (!fitted()) {
    throw std::invalid_argument("this MemoryModel has not been fitted: call fit or probe first");
  }
  if (kind != state_.kind) {
    throw std::invalid_argument(state_.kind == SizeKind::batch
                                    ? "this model is of batches: give n and length"
                                    : "this model is of one size: give the size alone");
  }
}

double MemoryModel::evaluate(double n, double length) const {
  const auto terms = detail::shape_terms(n, length, state_.kind == SizeKind::batch);
  double result = state_.floor;
  for (const std::vector<double>& phase : state_.phases) {
    double bytes = 0;
    for (std::size_t j = 0; j < phase.size(); ++j) {
      bytes += phase[j] * terms[j];
    }
    result = std::max(result, bytes);
  }
  return result;
}

double MemoryModel::peak(double size) const {
  check(SizeKind::size);
  check_argument("size", size);
  return evaluate(size, 0);
}

double MemoryModel::peak(double n, double length) const {
  check(SizeKind::batch);
  check_argument("n", n);
  check_argument("length", length);
  return evaluate(n, length);
}

double MemoryModel::peak_of(std::span<const double> lengths) const {
  check(SizeKind::batch);
  if (lengths.empty()) {
    return 0;
  }
  for (const double length : lengths) {
    check_argument("lengths", length);
  }
  return evaluate(static_cast<double>(lengths.size()),
                  *std::max_element(lengths.begin(), lengths.end()));
}

double MemoryModel::with_margin(double bytes) const {
  return bytes + state_.margin * std::max(bytes, reference_);
}

// The inverse.
double MemoryModel::without_margin(double bytes) const {
  const double large = bytes / (1 + state_.margin);
  return large >= reference_ ? large : bytes - state_.margin * reference_;
}

// What was measured is known: nothing smaller in both needs more, whatever the margin.
double MemoryModel::safe(double n, double length) const {
  const double expected = evaluate(n, length);
  double result = with_margin(expected);
  for (const MemorySample& sample : state_.samples) {
    if (!sample.out_of_memory && sample.n >= n && sample.length >= length) {
      result = std::min(result, std::max(sample.peak, expected));
    }
  }
  return result;
}

double MemoryModel::safe_peak(double size) const {
  (void)peak(size);  // checks the argument
  return safe(size, 0);
}

double MemoryModel::safe_peak(double n, double length) const {
  (void)peak(n, length);  // checks the arguments
  return safe(n, length);
}

std::int64_t MemoryModel::largest_batch(double length, double bytes) const {
  check(SizeKind::batch);
  check_argument("length", length);
  if (std::isnan(bytes)) {
    throw std::invalid_argument("budget must be a number, got nan");
  }
  const auto fits = [&](double n) { return safe(n, length) <= bytes; };
  if (!fits(1)) {
    return 0;
  }
  // Every phase is a line in n.
  const auto fixed = detail::shape_terms(0, length, true);
  const auto once = detail::shape_terms(1, length, true);
  auto most = static_cast<double>(kLargestSize);
  for (const std::vector<double>& phase : state_.phases) {
    double base = 0;
    double growth = 0;
    for (std::size_t j = 0; j < phase.size(); ++j) {
      base += phase[j] * fixed[j];
      growth += phase[j] * (once[j] - fixed[j]);
    }
    if (growth > 0) {
      most = std::min(most, (without_margin(bytes) - base) / growth);
    }
  }
  // The division rounds: safe_peak() itself decides.
  double n = std::max(std::floor(most), 1.0);
  while (n > 1 && !fits(n)) {
    n -= std::max(1.0, std::floor(n * 1e-15));
  }
  for (const MemorySample& sample : state_.samples) {
    if (sample.n > n && fits(sample.n)) {
      n = sample.n;
    }
  }
  while (n < static_cast<double>(kLargestSize) && fits(n + 1)) {
    n += 1;
  }
  return static_cast<std::int64_t>(n);
}

std::int64_t MemoryModel::largest_size(double bytes) const {
  check(SizeKind::size);
  if (std::isnan(bytes)) {
    throw std::invalid_argument("budget must be a number, got nan");
  }
  const auto fits = [&](std::int64_t size) { return safe(static_cast<double>(size), 0) <= bytes; };
  if (fits(kLargestSize)) {
    return kLargestSize;
  }
  std::int64_t good = 0;
  std::int64_t bad = kLargestSize;
  while (bad - good > 1) {
    const std::int64_t middle = good + (bad - good) / 2;
    (fits(middle) ? good : bad) = middle;
  }
  return good;
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
