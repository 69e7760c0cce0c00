#include <brim/fit/fit_batching.h>
#include <brim/fit/model_limit.h>
#include <brim/memory/budget.h>
#include <brim/memory/bytes.h>
#include <brim/memory/release.h>
#include <brim/memory/stats.h>
#include <brim/predict/collect_peaks.h>
#include <brim/predict/probe.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "check_argument.h"
#include "fit/feature_weights.h"
#include "fit/fit_search.h"
#include "fit/padded_search.h"
#include "predict/sure_peak.h"

namespace brim {
namespace {

using batching::Cost;
using detail::BatchNeed;
using detail::check_argument;
using detail::SamplesBySize;
using detail::TrialBatches;

constexpr std::int64_t kMostSamples = std::int64_t{1} << 16;  // in a batch that is probed
constexpr std::size_t kLengths = 32;                          // that represent those of a data set
// A measurement may hold this many times the budget before it counts as out of memory.
constexpr std::int64_t kBeyond = 2;
// Measuring what an allocator loses between blocks: only batches above this share of the fullest
// one matter, and at most this many run.
constexpr double kNearlyFull = 0.7;
constexpr int kMostRuns = 100;

/// Runs batches on a device, under a limit on what it may hold in all.
class BatchMeter {
 public:
  BatchMeter(const BatchWork& work, const FitOptions& options)
      : work_(work),
        device_(options.device ? resolve_device(*options.device) : default_device()),
        budget_(options.budget),
        ranks_(options.ranks),
        collect_{device_, {}, options.collect_garbage, shared(ranks_)} {
    const MemoryStats now = memory_stats(device_);
    const std::int64_t allowed = now.limit;
    held_ = now.allocated;
    check_argument(budget_ > 0, "budget must be positive, got ", budget_);
    check_argument(budget_ <= allowed, "budget must not exceed what the device allows, ",
                   format_bytes(allowed), ", got ", format_bytes(budget_));
    check_argument(held_ < budget_, "budget of ", format_bytes(budget_),
                   " is too small: ", format_bytes(held_), " are held on ", device_.str(),
                   " before the first batch");
    // One budget for all runs: opening one may release the allocator's cache, as nothing does
    // between the batches of a training loop.
    limited_.emplace(budget_ < allowed / kBeyond ? kBeyond * budget_ : allowed, device_);
  }

  [[nodiscard]] c10::Device device() const { return device_; }

  /// Bytes that were in use before the first batch.
  [[nodiscard]] std::int64_t held() const { return held_; }

  void run(std::span<const std::int64_t> batch) const {
    if (ranks_ != nullptr) {
      ranks_->begin(batch);
    }
    work_(batch);
  }

  /// The largest that any rank passed.
  [[nodiscard]] std::int64_t most(std::int64_t number) const {
    if (ranks_ != nullptr) {
      ranks_->most({&number, 1});
    }
    return number;
  }

  [[nodiscard]] static std::function<void(std::span<std::int64_t>)> shared(FitRanks* ranks) {
    return ranks == nullptr ? std::function<void(std::span<std::int64_t>)>()
                            : [ranks](std::span<std::int64_t> numbers) { ranks->most(numbers); };
  }

  [[nodiscard]] BatchNeed measure(std::span<const std::int64_t> batch) const {
    const PeakSample sample = detail::sure_peak([&] { run(batch); }, budget_, collect_);
    return {static_cast<double>(std::max(sample.peak, std::int64_t{1})), sample.out_of_memory};
  }

  /// Whether it runs as the allocator's blocks are now: a second try would find others.
  [[nodiscard]] bool fits_at_once(std::span<const std::int64_t> batch) const {
    const std::function<double(std::size_t)> call = [&](std::size_t) {
      run(batch);
      return 0.0;
    };
    return !collect_peaks(call, 1, collect_).front().out_of_memory;
  }

 private:
  const BatchWork& work_;
  c10::Device device_;
  std::int64_t budget_;
  std::int64_t held_;
  FitRanks* ranks_;
  CollectOptions collect_;
  std::optional<Budget> limited_;
};

/// Lengths that represent all: spread evenly over the samples, and over the logarithm of the
/// length. Empty samples represent no others.
std::vector<std::int64_t> representative_lengths(const SamplesBySize& samples) {
  const std::vector<std::int64_t>& sizes = samples.sizes;
  const std::size_t last = sizes.size() - 1;
  const std::size_t first = std::min(samples.end_of(0), last);
  const auto low = static_cast<double>(std::max<std::int64_t>(sizes[first], 1));
  const auto high = static_cast<double>(std::max<std::int64_t>(sizes[last], 1));
  std::set<std::int64_t> lengths;
  for (std::size_t k = 0; k < kLengths; ++k) {
    const double share = static_cast<double>(k) / (kLengths - 1);
    const double by_length = low * std::pow(high / low, share);
    const std::size_t places[] = {
        first + static_cast<std::size_t>(std::nearbyint(share * static_cast<double>(last - first))),
        samples.end_of(static_cast<std::int64_t>(by_length))};
    for (const std::size_t place : places) {
      lengths.insert(std::max<std::int64_t>(sizes[std::min(place, last)], 1));
    }
  }
  return {lengths.begin(), lengths.end()};
}

/// A model of n samples padded to the longest.
MemoryModel padded_model(const SamplesBySize& samples, const BatchMeter& meter,
                         const FitOptions& options) {
  // `n` samples, of which the longest has this length and the others are as close as possible.
  const auto run_padded = [&](std::int64_t n, std::int64_t length) {
    const std::size_t end = samples.end_of(length);
    std::vector<std::int64_t> batch(static_cast<std::size_t>(n));
    for (std::size_t i = 0; i < batch.size(); ++i) {
      batch[i] = samples.indices[end - 1 - i % end];
    }
    meter.run(batch);
  };
  const std::int64_t most = std::min(static_cast<std::int64_t>(samples.sizes.size()), kMostSamples);
  return probe_batches(run_padded, representative_lengths(samples), most,
                       {.device = meter.device(),
                        .budget = options.budget,
                        .probes = options.probes,
                        .collect_garbage = options.collect_garbage,
                        .most_of_ranks = BatchMeter::shared(options.ranks)});
}

/// Reduces the limit until torch's CUDA allocator can reserve what batches need. It rounds and
/// splits blocks, the more the batches differ, so it reserves more than tensors hold, and the
/// budget is on that. Full batches of all lengths run under the budget, smaller ones after each
/// failure, until all have fitted twice.
void leave_room_for_allocator(FittedLimit& fitted, const detail::FitSearch& search,
                              const BatchMeter& meter, std::int64_t budget) {
  const auto full_batches = [&] {
    const TrialBatches trial = search.trial(fitted);
    const auto need = [&](std::size_t b) {
      const detail::BatchShape& shape = trial.shapes[b];
      return fitted.need                      ? trial.batches.loads[b]
             : fitted.cost == Cost::Kind::sum ? shape.total
                                              : shape.count * shape.longest;
    };
    std::vector<std::size_t> full(trial.shapes.size());
    std::iota(full.begin(), full.end(), std::size_t{0});
    double most = 0.0;
    for (const std::size_t b : full) {
      most = std::max(most, need(b));
    }
    std::erase_if(full, [&](std::size_t b) { return need(b) < kNearlyFull * most; });
    std::ranges::stable_sort(full, {}, [&](std::size_t b) { return trial.shapes[b].longest; });
    // Short and long ones in turn: the blocks of one are of least use to the next.
    const std::size_t step = std::max(full.size() / 12, std::size_t{1});
    std::vector<std::vector<std::int64_t>> batches;
    for (std::size_t i = 0; i < full.size(); i += step) {
      const bool is_short = i / step % 2 == 0;
      const auto batch = trial.batches[full[is_short ? i / 2 : full.size() - 1 - i / 2]];
      batches.emplace_back(batch.begin(), batch.end());
    }
    return batches;
  };
  release_cached(meter.device());
  const auto reduce = [&](double share) {
    fitted.maximum = static_cast<std::int64_t>(static_cast<double>(fitted.maximum) * share);
  };
  // What is cached beside live blocks of others counts as reserved, and few requests fit into it.
  const auto stuck = static_cast<double>(meter.most(memory_stats(meter.device()).inactive_split));
  reduce(1 / (1 + stuck / static_cast<double>(budget)));
  const Budget limited(budget, meter.device());
  auto batches = full_batches();
  std::size_t fitted_runs = 0;
  for (int i = 0; i < kMostRuns && fitted_runs < 2 * batches.size(); ++i) {
    if (meter.fits_at_once(batches[fitted_runs % batches.size()])) {
      ++fitted_runs;
    } else {
      reduce(detail::kSmallerLimit);
      fitted_runs = 0;
      batches = full_batches();
    }
  }
}

using Sizes = std::vector<std::int64_t>;

void check_features(std::span<const std::int64_t> features, std::size_t columns) {
  const auto least = std::min_element(features.begin(), features.end());
  check_argument(*least >= 0, "sizes must not be negative, got ", *least, " at index ",
                 static_cast<std::size_t>(least - features.begin()) / columns);
}

/// One size for each sample, to tell small ones from large ones.
Sizes sums_of(std::span<const std::int64_t> features, std::size_t columns) {
  constexpr auto kMost = std::numeric_limits<std::int64_t>::max() / 8;
  Sizes result(features.size() / columns);
  for (std::size_t i = 0; i < features.size(); ++i) {
    result[i / columns] += std::min(features[i], kMost);
  }
  return result;
}

}  // namespace

batching::Limit FittedLimit::limit() const {
  if (need) {
    return need->limit(maximum);
  }
  return cost == Cost::Kind::sum ? batching::Limit(Cost::sum(), maximum)
                                 : model_limit(model.value(), maximum);
}

FittedLimit fit_batching(std::span<const std::int64_t> sizes, const BatchWork& work,
                         const MakeBatching& make, const FitOptions& options) {
  const bool padded = options.cost == Cost::Kind::padded;
  check_argument(padded || options.cost == Cost::Kind::sum,
                 "cost must be padded or sum to be fitted");
  check_argument(!sizes.empty(), "sizes is empty: there is nothing to measure");
  const auto columns = static_cast<std::size_t>(options.columns);
  check_argument(options.columns >= 1 && columns <= PaddedNeed::kMostSizes &&
                     (padded || columns == 1) && sizes.size() % columns == 0,
                 "columns must be from 1 to ", PaddedNeed::kMostSizes,
                 ", the sizes in which samples are padded, got ", options.columns);
  const bool several = columns > 1;
  if (several) {
    check_features(sizes, columns);
  }
  const Sizes sums = several ? sums_of(sizes, columns) : Sizes();
  const std::span<const std::int64_t> each = several ? std::span(sums) : sizes;
  const SamplesBySize samples(each);
  check_argument(samples.sizes[0] >= 0, "sizes must not be negative, got ", samples.sizes[0],
                 " at index ", samples.indices[0]);
  const BatchMeter meter(work, options);
  const detail::MeasureBatch measure = [&](std::span<const std::int64_t> batch) {
    return meter.measure(batch);
  };
  const detail::FitSearch search{each, samples, static_cast<double>(options.budget), measure, make};
  FittedLimit fitted{options.cost, options.budget};
  if (several) {
    fitted = detail::fit_padded_sizes(search, sizes, columns, options.probes);
  } else if (padded) {
    fitted.model = padded_model(samples, meter, options);
    search.check_padded(fitted);
  } else {
    fitted = search.largest_total();
  }
  if (meter.device().is_cuda()) {
    leave_room_for_allocator(fitted, search, meter, options.budget);
  }
  const std::int64_t smallest = std::max<std::int64_t>(samples.sizes[0], 1);
  const auto maximum = static_cast<double>(fitted.maximum);
  bool fits = fitted.maximum >= smallest;
  if (several) {
    const auto place = static_cast<std::size_t>(samples.indices[0]) * columns;
    const std::vector<double> least(sizes.begin() + static_cast<std::ptrdiff_t>(place),
                                    sizes.begin() + static_cast<std::ptrdiff_t>(place + columns));
    fits = fitted.maximum > 0 && fitted.need->largest_count(least, maximum) > 0;
  } else if (padded) {
    fits = fitted.model->largest_batch(static_cast<double>(smallest), maximum) > 0;
  }
  check_argument(fits, "budget is too small: no batch is expected to stay within ",
                 format_bytes(options.budget), ", of which ", format_bytes(meter.held()),
                 " were held before: the smallest sample has size ", smallest,
                 fitted.model  ? ", and the measurements gave\n" + fitted.model->to_string()
                 : fitted.need ? ", and the measurements gave\n" + fitted.need->to_string()
                               : "");
  return fitted;
}

std::vector<double> fit_weights(std::span<const std::int64_t> features, std::size_t columns,
                                const BatchWork& work, const FitOptions& options) {
  check_argument(columns > 0 && !features.empty() && features.size() % columns == 0,
                 "features must have ", columns, " numbers for each sample, got ", features.size());
  check_features(features, columns);
  const BatchMeter meter(work, options);
  std::vector<double> weights =
      detail::feature_weights(features, columns, static_cast<double>(options.budget),
                              [&](auto batch) { return meter.measure(batch); });
  // Sizes are rounded to whole numbers: that must not matter.
  constexpr double kMean = 1024;
  double mean = 0.0;
  for (std::size_t i = 0; i < features.size(); ++i) {
    mean += weights[i % columns] * static_cast<double>(features[i]);
  }
  const std::size_t samples = features.size() / columns;
  mean /= static_cast<double>(samples);
  for (double& weight : weights) {
    weight *= mean > 0 ? std::max(kMean / mean, 1.0) : 1.0;
  }
  return weights;
}

std::vector<std::int64_t> combined_sizes(std::span<const std::int64_t> features,
                                         std::span<const double> weights) {
  const std::size_t columns = weights.size();
  std::vector<std::int64_t> sizes(features.size() / columns);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    double size = 0.0;
    for (std::size_t c = 0; c < columns; ++c) {
      size += weights[c] * static_cast<double>(features[i * columns + c]);
    }
    sizes[i] = std::max<std::int64_t>(static_cast<std::int64_t>(std::ceil(size)), 1);
  }
  return sizes;
}

}  // namespace brim
