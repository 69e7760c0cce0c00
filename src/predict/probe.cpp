#include <brim/memory/bytes.h>
#include <brim/memory/stats.h>
#include <brim/predict/collect_peaks.h>
#include <brim/predict/probe.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "check_argument.h"
#include "number_text.h"
#include "predict/frontier.h"
#include "predict/phase_fit.h"
#include "predict/probe_plan.h"
#include "predict/sure_peak.h"

namespace brim {
namespace {

using Shape = detail::ProbePlan::Shape;
using Work = std::function<void(std::int64_t, std::int64_t)>;

// If no budget is given: a measurement should not take the last of a device's memory.
constexpr double kShareOfFree = 0.9;
// How far a measurement may exceed a budget if no other is left: enough for twice as many samples.
constexpr double kBeyond = 2;
// A size nearer to the budget is worth a call if it is this many times the largest measured one.
constexpr double kWorthACall = 1.02;

std::string name_of(const Shape& shape, SizeKind kind) {
  return kind == SizeKind::batch
             ? "(" + detail::text(shape.first) + ", " + detail::text(shape.second) + ")"
             : detail::text(shape.first);
}

MemorySample memory_sample(const Shape& shape, const PeakSample& sample) {
  return {static_cast<double>(shape.first), static_cast<double>(shape.second),
          static_cast<double>(sample.peak), sample.out_of_memory, static_cast<double>(sample.base)};
}

/// Measures pieces of work on one device, under a limit on what it may hold in all.
class Prober {
 public:
  /// @param with_base whether samples tell what was held all the time.
  Prober(const Work& work, SizeKind kind, const ProbeOptions& options, bool with_base = true)
      : work_(work),
        kind_(kind),
        with_base_(with_base),
        budget_(options.budget),
        device_(options.device ? resolve_device(*options.device) : default_device()),
        collect_{device_, options.cleanup, options.collect_garbage, options.most_of_ranks} {
    const bool batches = kind == SizeKind::batch;
    detail::check_argument(options.near_budget == 0 || (options.near_budget > 0 && !batches),
                           "near_budget must be ", batches ? "0 for batches" : "0 or more",
                           ", got ", options.near_budget);
    detail::check_argument(budget_.value_or(1) > 0,
                           "budget must be a positive number of bytes, got ", budget_.value_or(1));
  }

  /// Bytes that may be held on the device, older tensors included: `times` the budget, at most what
  /// there is.
  [[nodiscard]] double limit(double times = 1) const {
    const MemoryStats stats = memory_stats(device_);
    const auto held = static_cast<double>(stats.allocated);
    const auto free = static_cast<double>(stats.free);
    const double here = budget_ ? std::min(times * static_cast<double>(*budget_), held + free)
                                : held + kShareOfFree * free;
    if (!collect_.most_of_ranks) {
      return here;
    }
    std::int64_t least = -static_cast<std::int64_t>(here);
    collect_.most_of_ranks({&least, 1});
    return -static_cast<double>(least);
  }

  [[nodiscard]] PeakSample measure(const Shape& shape) const {
    PeakSample sample = detail::sure_peak([&] { work_(shape.first, shape.second); },
                                          static_cast<std::int64_t>(limit()), collect_);
    sample.base = with_base_ ? sample.base : 0;
    return sample;
  }

  /// A model from a few of the sizes, spread over the range, small ones first.
  [[nodiscard]] MemoryModel spread(std::vector<Shape> sizes, std::int64_t probes) const {
    detail::ProbePlan plan(std::move(sizes), kind_, probes);
    // The first call creates what later ones reuse: kernels, workspaces, an optimizer's state.
    const PeakSample warm_up = measure(plan.smallest());
    TORCH_CHECK_WITH(OutOfMemoryError, !warm_up.out_of_memory,
                     device_.is_cpu() ? "CPU" : device_.str(),
                     " out of memory. Even the smallest of the sizes, ",
                     name_of(plan.smallest(), kind_), ", does not fit: it needs at least ",
                     format_bytes(warm_up.peak), ", ", format_bytes(warm_up.start),
                     " of which were held before, and ", limit_text(), " are allowed");
    TORCH_CHECK_VALUE(warm_up.peak > 0, "the work held no memory on ", device_,
                      ": device must be the one that it runs on");
    while (const auto shape = plan.next(limit(), limit(kBeyond))) {
      const PeakSample sample = measure(*shape);
      plan.add(*shape, static_cast<double>(sample.peak), static_cast<double>(sample.start),
               sample.out_of_memory, static_cast<double>(sample.base));
    }
    check_enough(plan.samples(), plan.smallest(), warm_up);
    MemoryModel model;
    model.fit(plan.samples(), kind_);
    return model;
  }

  /// Measures up to `count` sizes more, each the largest that those before show to fit.
  void approach_budget(MemoryModel& model, std::int64_t last, std::int64_t count) const {
    for (std::int64_t i = 0; i < count; ++i) {
      std::vector<MemorySample> samples = model.samples();
      const std::int64_t size = std::min(model.largest_size(limit()), last);
      const auto largest = std::ranges::max(samples, {}, &MemorySample::n).n;
      if (static_cast<double>(size) < kWorthACall * largest) {
        break;
      }
      const PeakSample sample = measure({size, 0});
      samples.push_back(memory_sample({size, 0}, sample));
      model.fit(samples, SizeKind::size);
    }
  }

 private:
  [[nodiscard]] std::string limit_text() const {
    return format_bytes(static_cast<std::int64_t>(limit()));
  }

  /// Says why too few sizes could be measured for a model: they need more than the limit, or
  /// something within it failed twice, which a larger budget would not cure.
  void check_enough(const std::vector<MemorySample>& samples, const Shape& smallest,
                    const PeakSample& warm_up) const {
    const auto fitted = std::ranges::count_if(
        samples, [](const MemorySample& sample) { return !sample.out_of_memory; });
    const std::size_t least = detail::least_shapes(kind_);
    if (std::cmp_greater_equal(fitted, least)) {
      return;
    }
    for (const MemorySample& sample : samples) {
      TORCH_CHECK_WITH(OutOfMemoryError, !sample.out_of_memory || sample.peak > limit(),
                       device_.is_cpu() ? "CPU" : device_.str(), " out of memory. Size ",
                       name_of({std::llround(sample.n), std::llround(sample.length)}, kind_),
                       " failed twice, though it held and asked for ",
                       format_bytes(std::llround(sample.peak)), " and ", limit_text(),
                       " are allowed: something else takes the memory, or it is in fragments");
    }
    TORCH_CHECK_VALUE(false, "the limit of ", limit_text(),
                      " is too small for these sizes: a fit needs ", least, " of them, but only ",
                      fitted, fitted == 1 ? " stays" : " stay", " within it. The smallest, ",
                      name_of(smallest, kind_), ", needs ", format_bytes(warm_up.peak),
                      ", of which ", format_bytes(warm_up.start),
                      " were held before. Raise the budget, or pass smaller sizes");
  }

  const Work& work_;
  SizeKind kind_;
  bool with_base_;
  std::optional<std::int64_t> budget_;
  c10::Device device_;
  CollectOptions collect_;
};

}  // namespace

MemoryModel probe_memory(const std::function<void(std::int64_t)>& work,
                         const std::vector<std::int64_t>& sizes, const ProbeOptions& options) {
  std::vector<Shape> shapes;
  shapes.reserve(sizes.size());
  for (const std::int64_t size : sizes) {
    shapes.emplace_back(size, 0);
  }
  const Work of_shape = [&](std::int64_t size, std::int64_t) { work(size); };
  const Prober prober(of_shape, SizeKind::size, options);
  MemoryModel model = prober.spread(std::move(shapes), options.probes);
  prober.approach_budget(model, std::ranges::max(sizes), options.near_budget);
  return model;
}

MemoryModel probe_memory(const std::function<void(std::int64_t, std::int64_t)>& work,
                         const std::vector<std::pair<std::int64_t, std::int64_t>>& sizes,
                         const ProbeOptions& options) {
  return Prober(work, SizeKind::batch, options).spread(sizes, options.probes);
}

MemoryModel probe_batches(const std::function<void(std::int64_t, std::int64_t)>& work,
                          const std::vector<std::int64_t>& lengths, std::int64_t most,
                          const ProbeOptions& options) {
  constexpr std::size_t kSpreadLengths = 5;
  constexpr std::int64_t kFewest = 4;  // numbers of samples go up to this at least
  constexpr int kMostAtTheLimit = 16;
  constexpr double kLeastCaution = 0.02;
  constexpr double kMostCaution = 0.25;
  constexpr double kSmaller = 0.95;
  detail::check_argument(!lengths.empty() && most >= 1,
                         "lengths must not be empty, and most must be positive, got ",
                         lengths.size(), " lengths and ", most);
  std::vector<std::int64_t> ascending = lengths;
  std::sort(ascending.begin(), ascending.end());
  std::vector<Shape> shapes;
  for (std::size_t i = 0; i < kSpreadLengths; ++i) {
    const std::int64_t length = ascending[i * (ascending.size() - 1) / (kSpreadLengths - 1)];
    for (std::int64_t n = 1; n <= std::max(most, kFewest); n *= 2) {
      shapes.emplace_back(n, length);
    }
  }
  // Without the base: a limit that proves to be too large is lowered by shares of the whole.
  const Prober prober(work, SizeKind::batch, options, false);
  MemoryModel model = prober.spread(std::move(shapes), options.probes);
  double caution = std::clamp(model.error().worst, kLeastCaution, kMostCaution);
  // What tensors may hold. An accelerator's allocator reserves more than that, and the limit may
  // apply to what it reserves: running out of memory below the limit shows it.
  double limit = prober.limit();
  for (int i = 0; i < kMostAtTheLimit; ++i) {
    const auto shape = detail::next_at_the_limit(model, ascending, most, limit, caution);
    if (!shape) {
      break;
    }
    const auto n = static_cast<double>(shape->first);
    const auto length = static_cast<double>(shape->second);
    const double expected = model.peak(n, length);
    const PeakSample sample = prober.measure(*shape);
    std::vector<MemorySample> samples = model.samples();
    samples.push_back(memory_sample(*shape, sample));
    model.fit(samples, SizeKind::batch, false);
    if (sample.out_of_memory && expected <= limit) {
      limit *= kSmaller;
    }
    const double surprise = std::abs(samples.back().peak / expected - 1);
    caution = std::clamp(2 * surprise, kLeastCaution, kMostCaution);
  }
  model.fit(std::vector<MemorySample>(model.samples()), SizeKind::batch);
  return model;
}

}  // namespace brim
