#include "fit/fit_search.h"

#include <brim/batching/stream.h>
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

namespace brim::detail {
namespace {

constexpr std::size_t kEpochs = 4;
constexpr std::size_t kMostRead = 200'000;  // that are read, in all epochs together
constexpr std::size_t kMostMeasured = 32;   // of a batching's own batches
constexpr int kMostRounds = 48;             // of making a batching and measuring its batches
constexpr double kNoisy = 0.01;         // a model with a larger margin is checked on more batches
constexpr double kGrowth = 2.0;         // the most by which a limit changes at once
constexpr double kWorthGrowing = 1.05;  // smaller steps follow the bounds of all batches
constexpr double kFlat = 1.01;          // of the least: a need up to there is the floor
// A total is large enough once this share of the budget is in use; steps aim a little higher.
constexpr double kUsed = 0.96;
constexpr double kAim = 0.99;
// The needs of batches of like sizes differ by this share, depending on the order of samples.
constexpr double kSpread = 0.005;

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

std::int64_t whole(double number) { return static_cast<std::int64_t>(number); }

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
  return chosen;
}

void learn(MemoryModel& model, double n, double length, const BatchNeed& need) {
  std::vector<MemorySample> samples = model.samples();
  samples.push_back({n, length, need.peak, need.out_of_memory});
  model.fit(samples, SizeKind::batch);
}

/// Measures batches between the lengths where the need jumps, until it is known at which length.
void locate_jumps(MemoryModel& model, const FitSearch& search) {
  const SamplesBySize& samples = search.by_size;
  for (std::size_t run = 0; run < kMostMeasured; ++run) {
    std::optional<MemoryModel::Jump> wide;
    std::size_t first = 0;  // sample between its lengths
    std::size_t last = 0;
    for (const MemoryModel::Jump& jump : model.jumps()) {
      first = samples.end_of(whole(jump.after));
      last = samples.end_of(whole(jump.from) - 1);
      if (first < last) {
        wide = jump;
        break;
      }
    }
    if (!wide) {
      return;
    }
    const std::int64_t length = samples.sizes[first + (last - first) / 2];
    const std::size_t end = samples.end_of(length);
    std::vector<std::int64_t> batch(static_cast<std::size_t>(wide->n));
    for (std::size_t i = 0; i < batch.size(); ++i) {
      batch[i] = samples.indices[end - 1 - i % end];
    }
    learn(model, wide->n, static_cast<double>(length), search.measure(batch));
  }
}

/// What the search for the largest total has learned so far.
class TotalSearch {
 public:
  explicit TotalSearch(const FitSearch& search) : search_(search) {}

  [[nodiscard]] FittedLimit run() {
    std::int64_t total = longest_alone();
    for (std::size_t round = 0; total > 0 && round < 2 * kMostMeasured; ++round) {
      total = step(total);
    }
    return result();
  }

 private:
  BatchNeed learn(std::span<const std::int64_t> samples, const Terms& terms) {
    const BatchNeed need = known_[terms] = search_.measure(samples);
    most_held_ = std::max(most_held_, need.peak);
    least_ = std::min(least_, need.peak);
    if (need.out_of_memory) {
      ran_out_ = true;
    } else {
      error_ = std::max(error_, need.peak / bound_.at(terms) - 1);
      bound_.add(terms, need.peak);
    }
    return need;
  }

  // Measures single samples of growing size, because all that fit alone must be in a batch: a
  // sample of twice the size is expected to need at most four times as much. Returns the largest
  // size that was within the limit.
  std::int64_t longest_alone() {
    const SamplesBySize& samples = search_.by_size;
    const std::int64_t first = samples.indices[0];
    (void)search_.measure({&first, 1});  // makes what later calls find ready
    for (const std::size_t count : {std::size_t{1}, std::size_t{2}}) {
      learn(std::vector(count, first), terms_of(copies(count, samples.sizes[0])));
    }
    const std::int64_t largest = samples.sizes.back();
    everything_ = std::max<std::int64_t>(
        std::accumulate(samples.sizes.begin(), samples.sizes.end(), std::int64_t{0}), 1);
    bad_ = everything_ + 1;
    std::int64_t total = std::max<std::int64_t>(samples.sizes[0], 1);
    while (total < largest) {
      const double growth = std::min(kGrowth, std::sqrt(kGrowth * search_.limit / most_held_));
      const std::int64_t longer =
          std::min(std::max(whole(growth * static_cast<double>(total)), total + 1), largest);
      const std::size_t place = samples.end_of(longer) - 1;
      const Terms alone = terms_of(copies(1, samples.sizes[place]));
      if (!known_.contains(alone)) {
        learn({&samples.indices[place], 1}, alone);
      }
      if (most_held_ > search_.limit) {
        break;
      }
      total = longer;
    }
    return total;
  }

  // Bounds the batches of a total and measures those with the highest bounds. Returns the total to
  // try next, 0 at the end.
  std::int64_t step(std::int64_t total) {
    const double limit = search_.limit;
    const TrialBatches trial = search_.trial({batching::Cost::Kind::sum, total});
    const std::vector<double> needs = bounds_of(trial);
    double most = most_expected(trial, needs);
    const bool nearly = kUsed * limit <= most && most <= limit;
    std::vector<std::size_t> order(needs.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::stable_sort(order, std::ranges::greater(),
                             [&](std::size_t batch) { return needs[batch]; });
    const auto highest_few = std::min<std::size_t>(order.size(), nearly ? 4 : 1);
    order.resize(highest_few);
    if (ran_out_) {  // why is not known: perhaps since there is much of one term
      add_extremes(trial, order);
    }
    std::erase_if(order, [&](std::size_t b) { return known_.contains(terms_of(trial.shapes[b])); });
    if (!order.empty() && near_ < kMostMeasured) {
      bool out_of_memory = false;
      double highest = 0.0;
      for (const std::size_t batch : order) {
        const BatchNeed need = learn(trial.batches[batch], terms_of(trial.shapes[batch]));
        highest = std::max(highest, need.peak);
        out_of_memory = need.out_of_memory;
        if (out_of_memory) {
          break;  // the others will not be made
        }
      }
      // Far below the limit, or where the need does not grow, one batch of each total is enough: a
      // high floor (an optimizer's step) makes bounds high, and only larger totals lower them.
      const bool is_flat = highest <= kFlat * least_;
      const double growth = std::min(kGrowth, kAim * limit / highest);
      const std::int64_t next = std::min(whole(growth * static_cast<double>(total)), everything_);
      if (!out_of_memory && next < bad_ &&
          (kGrowth * highest <= limit || (is_flat && growth >= kWorthGrowing))) {
        return next;
      }
      near_ += std::min(order.size(), highest_few);
      if (!out_of_memory) {
        return total;
      }
      most = std::max(most, 1.1 * limit);
    }
    return most <= limit ? larger(total, most, nearly) : smaller(total, most);
  }

  /// The batches that have the most of a term.
  static void add_extremes(const TrialBatches& trial, std::vector<std::size_t>& order) {
    for (std::size_t term = 1; term < Terms().size(); ++term) {
      const auto most = std::ranges::max_element(
          trial.shapes, {}, [&](const BatchShape& shape) { return terms_of(shape)[term]; });
      const auto batch = static_cast<std::size_t>(most - trial.shapes.begin());
      if (most != trial.shapes.end() && std::ranges::find(order, batch) == order.end()) {
        order.push_back(batch);
      }
    }
  }

  [[nodiscard]] std::vector<double> bounds_of(const TrialBatches& trial) const {
    const double allowed = 1 + kSpread + 1.5 * error_;
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
  [[nodiscard]] double most_expected(const TrialBatches& trial,
                                     const std::vector<double>& needs) const {
    std::map<std::size_t, double> of_epoch;
    for (std::size_t b = 0; b < needs.size(); ++b) {
      double& highest = of_epoch[trial.shapes[b].epoch];
      highest = std::max(highest, needs[b]);
    }
    if (of_epoch.empty()) {
      return used_;
    }
    const auto [least, most] =
        std::minmax_element(of_epoch.begin(), of_epoch.end(),
                            [](const auto& a, const auto& b) { return a.second < b.second; });
    return std::isfinite(most->second) ? 2 * most->second - least->second : most->second;
  }

  std::int64_t larger(std::int64_t total, double most, bool nearly) {
    const double limit = search_.limit;
    double growth = kGrowth;
    if (most > used_ && good_ > 0) {  // as it grew before
      growth = 1 + (kAim * limit - most) / (most - used_) *
                       (1 - static_cast<double>(good_) / static_cast<double>(total));
    }
    growth = std::max(std::min(growth, kGrowth), kAim * limit / std::max(most, 1.0));
    good_ = total;
    used_ = most;
    const std::int64_t ceiling = bad_ <= everything_ ? (good_ + bad_) / 2 : everything_;
    // As a double: beyond 2^63 the product is no whole number.
    const double grown = static_cast<double>(total) * growth;
    const std::int64_t next = grown < static_cast<double>(ceiling) ? whole(grown) : ceiling;
    return nearly || next <= good_ ? 0 : next;
  }

  std::int64_t smaller(std::int64_t total, double most) {
    bad_ = total;
    const std::int64_t next =
        std::max({good_, whole(static_cast<double>(total) * kAim * search_.limit / most),
                  (good_ + total) / 2});
    return next <= good_ || next == bad_ ? 0 : next;
  }

  [[nodiscard]] FittedLimit result() const {
    check_argument(most_held_ > 1,
                   "the work held no memory on the device: it must be the one it runs on");
    std::set<double> totals;  // that did not run out of memory
    std::vector<MemorySample> samples;
    for (const auto& [terms, need] : known_) {
      const double total = terms[kTotalTerm];
      if (total > 0) {
        samples.push_back({total, 0, need.peak, need.out_of_memory});
        if (!need.out_of_memory) {
          totals.insert(total);
        }
      }
    }
    FittedLimit fitted{batching::Cost::Kind::sum, good_, std::nullopt, error_};
    if (totals.size() > 1) {
      fitted.model.emplace().fit(samples, SizeKind::size);
    }
    return fitted;
  }

  const FitSearch& search_;
  NeedBound bound_;
  std::map<Terms, BatchNeed> known_;
  bool ran_out_ = false;    // a batch did
  double error_ = 0.0;      // by how much a batch that fitted needed more than its bound
  double most_held_ = 0.0;  // bytes
  std::int64_t everything_ = 0;
  std::int64_t good_ = 0;  // the largest total within the limit
  std::int64_t bad_ = 0;   // the smallest total that is not
  double used_ = 0.0;      // bytes, by batches of the total that is good
  double least_ = std::numeric_limits<double>::infinity();  // bytes, by any batch
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
}

std::size_t SamplesBySize::end_of(std::int64_t size) const {
  return static_cast<std::size_t>(std::upper_bound(sizes.begin(), sizes.end(), size) -
                                  sizes.begin());
}

void FitSearch::check_padded(FittedLimit& fitted) const {
  MemoryModel& model = *fitted.model;
  std::set<std::pair<double, double>> measured;
  double smaller = kSmallerLimit;  // for a limit that was too large by an unknown amount
  for (int round = 0; round < kMostRounds; ++round) {
    locate_jumps(model, *this);
    const TrialBatches trial = this->trial(fitted);
    if (trial.shapes.empty()) {
      break;
    }
    std::size_t spread = 0;
    if (measured.size() < kMostMeasured) {
      spread = std::max(model.margin(), fitted.error) > kNoisy ? 16 : 8;
    }
    std::optional<BatchNeed> over;  // of a batch that did not stay within the limit
    for (const std::size_t batch : extreme_batches(trial.shapes, model, spread)) {
      const double n = trial.shapes[batch].count;
      const double length = std::max(trial.shapes[batch].longest, 1.0);
      if (!measured.emplace(n, length).second) {
        continue;
      }
      const BatchNeed need = measure(trial.batches[batch]);
      const double expected = model.safe_peak(n, length);
      if (need.out_of_memory || need.peak > expected) {
        fitted.error = std::max(fitted.error, need.peak / expected - 1);
        learn(model, n, length, need);
      }
      if (need.out_of_memory || need.peak > limit) {
        over = need;
        break;  // the remaining batches will not be made
      }
    }
    if (!over) {
      break;
    }
    if (measured.size() >= kMostMeasured / 2) {  // learning alone is not enough
      const double share = std::clamp(limit / over->peak, 1 / kGrowth, smaller);
      fitted.maximum = whole(static_cast<double>(fitted.maximum) * share);
      if (over->out_of_memory) {  // perhaps by little, in fragmented memory; perhaps by far
        smaller = std::max(smaller * smaller, 1 / kGrowth);
      }
    }
  }
  fitted.error = std::max(fitted.error, model.margin());
}

FittedLimit FitSearch::largest_total() const { return TotalSearch(*this).run(); }

}  // namespace brim::detail
