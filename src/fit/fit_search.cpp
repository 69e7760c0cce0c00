#include "fit/fit_search.h"

#include <brim/batching/stream.h>
#include <brim/need/size_search.h>
#include <brim/predict/need_bound.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include "check_argument.h"
#include "fit/fit_constants.h"

namespace brim::detail {
namespace {

using Terms = NeedBound::Terms;
constexpr std::size_t kTotalTerm = 4;

Terms terms_of(const BatchShape& shape) {
  const double n = shape.count;
  const double longest = shape.longest;
  const double total = shape.total;
  return {
      1.0, n, n * n, n * longest, total, total * total, shape.squares, longest, longest * longest};
}

BatchShape copies(std::size_t count, std::int64_t size) {
  const auto n = static_cast<double>(count);
  const auto length = static_cast<double>(size);
  return {.count = n, .longest = length, .total = n * length, .squares = n * length * length};
}

/// What work needs at least that ran out of memory.
double over(double limit) { return (1 + kRounding) * limit; }

std::int64_t whole(double number) { return static_cast<std::int64_t>(number); }

void learn(MemoryModel& model, double n, double length, const BatchNeed& need) {
  std::vector<MemorySample> samples = model.samples();
  samples.push_back({n, length, need.peak, need.out_of_memory, need.base});
  model.fit(samples, SizeKind::batch, false);
}

/// What single samples need, by length.
class SingleSamples {
 public:
  /// @param lengths of all samples, ascending and different.
  SingleSamples(std::span<const std::int64_t> lengths, double limit)
      : lengths_(lengths), limit_(limit) {}

  void add(double length, const BatchNeed& need) {
    if (need.out_of_memory || need.peak > limit_) {
      fails_ = std::min(fails_, length);
      needs_.erase(needs_.lower_bound(fails_), needs_.end());
    } else if (length < fails_) {
      needs_[length] = std::max(need.peak - need.base, 1.0);
    }
  }

  /// The longest that fits; 0 for none.
  [[nodiscard]] double longest() const { return needs_.empty() ? 0 : needs_.rbegin()->first; }

  /// The next length to measure, until it is known up to which one samples fit, and between which
  /// ones the need jumps.
  [[nodiscard]] std::optional<std::int64_t> next() const {
    if (const auto open = between(longest(), fails_); !open.empty()) {
      const auto near = between(longest(), kGrowth * longest());
      return std::isfinite(fails_) ? open[open.size() / 2]
             : near.empty()        ? open.front()
                                   : near.back();
    }
    for (auto high = needs_.begin(); high != needs_.end() && needs_.size() < kMostMeasured;
         ++high) {
      if (high == needs_.begin() || high->second <= kGrowth * kGrowth * std::prev(high)->second) {
        continue;
      }
      if (const auto open = between(std::prev(high)->first, high->first); !open.empty()) {
        return open[open.size() / 2];
      }
    }
    return std::nullopt;
  }

 private:
  [[nodiscard]] std::span<const std::int64_t> between(double low, double high) const {
    const auto first = std::ranges::upper_bound(lengths_, low);
    return {first, std::max(first, std::ranges::lower_bound(lengths_, high))};
  }

  std::span<const std::int64_t> lengths_;
  double limit_;
  std::map<double, double> needs_;  // of those that fit: bytes that were not held all the time
  double fails_ = std::numeric_limits<double>::infinity();
};

/// Measures single samples, which the model learns.
void learn_alone(MemoryModel& model, const FitSearch& search) {
  const SamplesBySize& samples = search.by_size;
  SingleSamples alone(samples.lengths, search.limit);
  for (const MemorySample& sample : model.samples()) {
    if (sample.n == 1) {
      alone.add(sample.length, {sample.peak, sample.out_of_memory, sample.base});
    }
  }
  while (const auto length = alone.next()) {
    BatchNeed need = search.measure({&samples.indices[samples.end_of(*length) - 1], 1});
    need.peak = std::max(need.peak, need.out_of_memory ? over(search.limit) : 0.0);
    alone.add(static_cast<double>(*length), need);
    learn(model, 1, static_cast<double>(*length), need);
  }
}

/// The batches to measure under a padded cost: those that are extreme in some respect, and about
/// `spread` more of all lengths.
std::vector<std::size_t> extreme_batches(const std::vector<BatchShape>& shapes,
                                         const MemoryModel& model, std::size_t spread) {
  std::vector<std::size_t> by_length(shapes.size());
  std::iota(by_length.begin(), by_length.end(), std::size_t{0});
  const auto most = [&](const auto& key) {
    return *std::ranges::max_element(by_length, {},
                                     [&](std::size_t batch) { return key(shapes[batch]); });
  };
  std::ranges::stable_sort(by_length, {}, [&](std::size_t batch) {
    return std::array{shapes[batch].longest, shapes[batch].count};
  });
  std::vector<std::size_t> chosen{
      by_length.back(), most([](const BatchShape& s) { return std::array{s.count, s.longest}; }),
      most([&](const BatchShape& s) { return model.peak(s.count, std::max(s.longest, 1.0)); }),
      most([](const BatchShape& s) { return s.count * s.longest; })};
  if (spread > 0) {
    const std::size_t step = std::max(shapes.size() / spread, std::size_t{1});
    for (std::size_t i = 0; i < by_length.size(); i += step) {
      chosen.push_back(by_length[i]);
    }
  }
  // Short ones first: the first one that is too long excludes all that are longer.
  std::ranges::stable_sort(chosen, {}, [&](std::size_t batch) { return shapes[batch].longest; });
  return chosen;
}

/// What the search for the largest total has learned so far.
class TotalSearch {
 public:
  explicit TotalSearch(const FitSearch& search)
      : search_(search),
        base_(search.measure({&search.by_size.indices[0], 1}).base),
        limit_(search.limit - base_),
        alone_(search.by_size.lengths, limit_),
        everything_(std::max<std::int64_t>(
            std::accumulate(search.sizes.begin(), search.sizes.end(), std::int64_t{0}), 1)) {}

  [[nodiscard]] FittedLimit run() {
    const SamplesBySize& samples = search_.by_size;
    const std::int64_t first = samples.indices[0];
    learn({first, first}, copies(2, samples.sizes[0]));
    // All that fit alone must be in a batch, so single samples come first.
    while (const auto length = alone_.next()) {
      alone_.add(static_cast<double>(*length),
                 learn({samples.indices[samples.end_of(*length) - 1]}, copies(1, *length)));
    }
    std::int64_t total = samples.lengths.empty() ? 1 : whole(alone_.longest());
    if (total == 0) {
      return result(0);
    }
    // Totals grow only as far as those before allow.
    SizeSearch growing(options(total, Start::probe));
    for (std::size_t round = 0; round < kMostMeasured && !growing.finished(); ++round) {
      growing.record(attempt(total, learn_highest(total)));
      total = std::min(growing.next(), whole(kGrowth * static_cast<double>(total)));
    }
    total = growing.best().value_or(0);
    SizeSearch totals(options(1, Start::at_upper));
    for (std::size_t round = 0; total > 0 && !totals.finished() && round < kMostMeasured; ++round) {
      const double most = most_needed(total);
      totals.record(attempt(total, {most, most > limit_}));
      if ((1 - kWorthARun) * limit_ <= most && most <= limit_) {
        break;
      }
      // Of a total that is over the limit, the need is known, not only a part of it.
      const std::int64_t in_proportion =
          whole(static_cast<double>(total) * (1 - kWorthARun) * limit_ / std::max(most, limit_));
      total = totals.best() ? totals.next() : std::max(totals.next(), in_proportion);
    }
    return result(totals.best().value_or(0));
  }

 private:
  BatchNeed learn(const std::vector<std::int64_t>& samples, const BatchShape& shape) {
    const Terms terms = terms_of(shape);
    const auto [known, is_new] = known_.try_emplace(terms);
    if (is_new) {
      BatchNeed& need = known->second = search_.measure(samples);
      need = {std::max(need.peak - base_, 1.0), need.out_of_memory};
      error_ = std::max(error_, need.peak / bound_.at(terms) - 1);
      if (!need.out_of_memory) {
        bound_.add(terms, need.peak);
      }
    }
    return known->second;
  }

  [[nodiscard]] SizeSearchOptions options(std::int64_t lower, Start start) const {
    return {.start = start,
            .upper = everything_,
            .lower = lower,
            .circumstances = {.available = whole(limit_)}};
  }

  [[nodiscard]] Attempt attempt(std::int64_t size, const BatchNeed& need) const {
    constexpr double kMostBytes = 9e18;  // that are a whole number
    const bool fits = !need.out_of_memory && need.peak <= limit_;
    return {.values = {size},
            .outcome = fits ? OomKind::none : OomKind::host_memory,
            .peak = whole(std::min(need.peak, kMostBytes)),
            .requested = 0,
            .available = whole(limit_)};
  }

  /// The batch of a total with the highest bound.
  BatchNeed learn_highest(std::int64_t total) {
    const TrialBatches trial = search_.trial({batching::Cost::Kind::sum, total});
    const std::vector<double> needs = bounds_of(trial);
    if (needs.empty()) {
      return {};
    }
    const auto highest = std::ranges::max_element(needs) - needs.begin();
    return learn_batch(trial, static_cast<std::size_t>(highest));
  }

  BatchNeed learn_batch(const TrialBatches& trial, std::size_t batch) {
    const auto samples = trial.batches[batch];
    return learn({samples.begin(), samples.end()}, trial.shapes[batch]);
  }

  /// What the batches of a total can need, after those with the highest bounds were measured.
  double most_needed(std::int64_t total) {
    const TrialBatches trial = search_.trial({batching::Cost::Kind::sum, total});
    for (;;) {
      const std::vector<double> needs = bounds_of(trial);
      std::vector<std::size_t> order(needs.size());
      std::iota(order.begin(), order.end(), std::size_t{0});
      std::ranges::stable_sort(order, std::ranges::greater(),
                               [&](std::size_t batch) { return needs[batch]; });
      order.resize(std::min<std::size_t>(order.size(), kHighest));
      const auto unknown = std::ranges::find_if(order, [&](std::size_t batch) {
        return !known_.contains(terms_of(trial.shapes[batch]));
      });
      const double most = most_expected(trial, needs);
      if (unknown == order.end() || near_ >= kMostMeasured) {
        return most;
      }
      ++near_;
      const BatchNeed need = learn_batch(trial, *unknown);
      if (need.out_of_memory || need.peak > limit_) {
        return std::max({need.peak, most_expected(trial, bounds_of(trial)), over(limit_)});
      }
    }
  }

  [[nodiscard]] std::vector<double> bounds_of(const TrialBatches& trial) const {
    const double allowed = 1 + kSpread + kTimesTheExcess * error_;
    std::vector<double> needs;
    needs.reserve(trial.shapes.size());
    for (const BatchShape& shape : trial.shapes) {
      const Terms terms = terms_of(shape);
      // A sample that was measured alone needs no allowance, or it might be left out.
      const auto found = shape.count == 1 ? known_.find(terms) : known_.end();
      needs.push_back(found != known_.end() ? found->second.peak : allowed * bound_.at(terms));
    }
    return needs;
  }

  // Epochs to come differ from these as these do from each other.
  [[nodiscard]] static double most_expected(const TrialBatches& trial,
                                            const std::vector<double>& needs) {
    std::map<std::size_t, double> of_epoch;
    for (std::size_t b = 0; b < needs.size(); ++b) {
      double& highest = of_epoch[trial.shapes[b].epoch];
      highest = std::max(highest, needs[b]);
    }
    if (of_epoch.empty()) {
      return 0;
    }
    const auto [least, most] =
        std::minmax_element(of_epoch.begin(), of_epoch.end(),
                            [](const auto& a, const auto& b) { return a.second < b.second; });
    return std::isfinite(most->second) ? 2 * most->second - least->second : most->second;
  }

  [[nodiscard]] FittedLimit result(std::int64_t total) const {
    std::set<double> totals;  // that did not run out of memory
    std::vector<MemorySample> samples;
    double most_held = 0;
    for (const auto& [terms, need] : known_) {
      most_held = std::max(most_held, need.peak);
      if (terms[kTotalTerm] > 0) {
        samples.push_back({terms[kTotalTerm], 0, base_ + need.peak, need.out_of_memory, base_});
        if (!need.out_of_memory) {
          totals.insert(terms[kTotalTerm]);
        }
      }
    }
    check_argument(most_held > 1,
                   "the work held no memory on the device: it must be the one it runs on");
    FittedLimit fitted{batching::Cost::Kind::sum, total, std::nullopt, error_};
    if (totals.size() > 1) {
      fitted.model.emplace().fit(samples, SizeKind::size);
    }
    return fitted;
  }

  const FitSearch& search_;
  double base_;   // bytes that are held all the time: what follows is beyond them
  double limit_;  // bytes
  SingleSamples alone_;
  std::int64_t everything_;  // the total of all samples
  NeedBound bound_;
  std::map<Terms, BatchNeed> known_;
  double error_ = 0.0;    // by how much a batch needed more than its bound
  std::size_t near_ = 0;  // the number of batches that were measured near the limit
};

}  // namespace

TrialBatches::TrialBatches(const batching::Batching& batching,
                           std::span<const std::int64_t> sizes) {
  const std::size_t epochs = std::clamp(kMostRead / sizes.size(), std::size_t{1}, kEpochs);
  for (std::size_t epoch = 0; epoch < epochs; ++epoch) {
    batching::Batches read;
    batching::BatchStream(batching, batching::epoch_seed(0, epoch)).read_rest(read);
    if (epoch == 1 && read.indices == batches.indices && read.offsets == batches.offsets) {
      break;  // not shuffled
    }
    for (std::size_t b = 0; b < read.count(); ++b) {
      BatchShape shape{.count = static_cast<double>(read[b].size()), .epoch = epoch};
      for (const std::int64_t sample : read[b]) {
        const auto size = static_cast<double>(sizes[static_cast<std::size_t>(sample)]);
        shape.longest = std::max(shape.longest, size);
        shape.total += size;
        shape.squares += size * size;
        batches.indices.push_back(sample);
      }
      batches.close(read.loads[b]);
      shapes.push_back(shape);
    }
  }
}

SamplesBySize::SamplesBySize(std::span<const std::int64_t> of) : indices(of.size()) {
  std::iota(indices.begin(), indices.end(), std::int64_t{0});
  const auto size_of = [&](std::int64_t index) { return of[static_cast<std::size_t>(index)]; };
  std::ranges::stable_sort(indices, {}, size_of);
  sizes.resize(of.size());
  std::transform(indices.begin(), indices.end(), sizes.begin(), size_of);
  std::ranges::unique_copy(sizes, std::back_inserter(lengths));
  std::erase(lengths, 0);
}

std::size_t SamplesBySize::end_of(std::int64_t size) const {
  return static_cast<std::size_t>(std::upper_bound(sizes.begin(), sizes.end(), size) -
                                  sizes.begin());
}

void FitSearch::check_padded(FittedLimit& fitted) const {
  MemoryModel& model = *fitted.model;
  learn_alone(model, *this);
  std::set<std::pair<double, double>> measured;
  double smaller = 1 - kWorthARun;  // for a limit that was too large by an unknown amount
  bool stable = false;              // what was measured has not changed the batches
  for (std::size_t round = 0; round < 2 * kMostMeasured; ++round) {
    const TrialBatches trial = this->trial(fitted);
    if (trial.shapes.empty()) {
      break;
    }
    const std::size_t spread = stable && measured.size() < kMostMeasured ? kOfAllLengths : 0;
    bool learned = false;
    std::optional<BatchNeed> over;  // of a batch that did not stay within the limit
    for (const std::size_t batch : extreme_batches(trial.shapes, model, spread)) {
      const double n = trial.shapes[batch].count;
      const double length = std::max(trial.shapes[batch].longest, 1.0);
      if (!measured.emplace(n, length).second) {
        continue;
      }
      const BatchNeed need = measure(trial.batches[batch]);
      const double expected = model.safe_peak(n, length);
      const bool is_loose = !stable && need.peak < expected - kWorthARun * (expected - need.base);
      if (need.out_of_memory || need.peak > expected || is_loose) {
        fitted.error = std::max(fitted.error, need.peak / expected - 1);
        learn(model, n, length, need);
        learned = true;
      }
      if (need.out_of_memory || need.peak > limit) {
        over = need;
        break;  // the remaining batches will not be made
      }
    }
    if (!over && stable) {
      break;
    }
    stable = !learned || measured.size() >= kMostMeasured / 2;
    if (over && measured.size() >= kMostMeasured / 2) {  // learning alone is not enough
      const double share =
          std::clamp((limit - over->base) / (over->peak - over->base), 1 / kGrowth, smaller);
      fitted.maximum -= whole((1 - share) * (static_cast<double>(fitted.maximum) - over->base));
      if (over->out_of_memory) {  // perhaps by little, in fragmented memory; perhaps by far
        smaller = std::max(smaller * smaller, 1 / kGrowth);
      }
    }
  }
  model.fit(std::vector(model.samples()), SizeKind::batch);
  fitted.error = std::max(fitted.error, model.margin());
}

FittedLimit FitSearch::largest_total() const { return TotalSearch(*this).run(); }

}  // namespace brim::detail
