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

namespace brim::detail {
namespace {

constexpr std::size_t kEpochs = 4;
constexpr std::size_t kMostRead = 200'000;  // that are read, in all epochs together
constexpr std::size_t kMostMeasured = 32;   // of a batching's own batches
constexpr double kHidden = 4;  // between lengths whose needs differ by more a jump may hide
constexpr std::size_t kMostAtJumps = 16;  // single samples, to find where the need jumps
constexpr int kMostRounds = 48;           // of making a batching and measuring its batches
constexpr double kNoisy = 0.01;           // a model with a larger margin is checked on more batches
constexpr double kGrowth = 2.0;           // the most by which a limit changes at once
constexpr double kUsed = 0.96;            // of the budget: a total that uses it is large enough
constexpr double kOver = 1.01;            // of the budget, at least: what ran out of memory needs
constexpr std::size_t kChecked = 4;       // batches with the highest bounds are measured
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

constexpr double kMostBytes = 9e18;

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
  // Short ones first: the first one that is too long excludes all that are longer.
  std::ranges::stable_sort(chosen, {}, [&](std::size_t batch) { return shapes[batch].longest; });
  return chosen;
}

/// What the search for the largest total has learned so far.
class TotalSearch {
 public:
  explicit TotalSearch(const FitSearch& search) : search_(search) {}

  [[nodiscard]] FittedLimit run() {
    const SamplesBySize& samples = search_.by_size;
    const std::int64_t first = samples.indices[0];
    (void)search_.measure({&first, 1});  // makes what later calls find ready
    learn({first, first}, copies(2, samples.sizes[0]));
    // All that fit alone must be in a batch, so single samples come first.
    std::int64_t total = climb(
        std::max<std::int64_t>(samples.sizes[0], 1), samples.sizes.back(), [&](std::int64_t size) {
          const std::size_t place = std::max<std::size_t>(samples.end_of(size), 1) - 1;
          return learn({samples.indices[place]}, copies(1, samples.sizes[place]));
        });
    const std::int64_t everything = std::max<std::int64_t>(
        std::accumulate(samples.sizes.begin(), samples.sizes.end(), std::int64_t{0}), 1);
    if (total > 0) {
      total = climb(total, everything, [&](std::int64_t each) { return learn_highest(each); });
    }
    SizeSearch totals(options(1, everything, Start::at_upper));
    for (int round = 0; total > 0 && !totals.finished() && round < kMostRounds; ++round) {
      const double most = most_needed(total);
      totals.record(attempt(total, {most, most > search_.limit}));
      if (kUsed * search_.limit <= most && most <= search_.limit) {
        break;
      }
      // Of a total that is over the limit, the need is known, not only a part of it.
      const std::int64_t in_proportion =
          whole(static_cast<double>(total) * kUsed * search_.limit / std::max(most, search_.limit));
      total = totals.best() ? totals.next() : std::max(totals.next(), in_proportion);
    }
    return result(totals.best().value_or(0));
  }

 private:
  using Samples = std::vector<std::int64_t>;

  BatchNeed learn(const Samples& samples, const BatchShape& shape) {
    const Terms terms = terms_of(shape);
    const auto [known, is_new] = known_.try_emplace(terms);
    if (is_new) {
      BatchNeed& need = known->second = search_.measure(samples);
      error_ = std::max(error_, need.peak / bound_.at(terms) - 1);
      most_held_ = std::max(most_held_, need.peak);
      if (!need.out_of_memory) {
        bound_.add(terms, need.peak);
      }
    }
    return known->second;
  }

  [[nodiscard]] SizeSearchOptions options(std::int64_t lower, std::int64_t upper,
                                          Start start) const {
    return {.start = start,
            .upper = upper,
            .lower = lower,
            .circumstances = {.available = whole(search_.limit)}};
  }

  [[nodiscard]] Attempt attempt(std::int64_t size, const BatchNeed& need) const {
    const bool fits = !need.out_of_memory && need.peak <= search_.limit;
    return {.values = {size},
            .outcome = fits ? OomKind::none : OomKind::host_memory,
            .peak = whole(std::min(need.peak, kMostBytes)),
            .requested = 0,
            .available = whole(search_.limit)};
  }

  /// The largest size that fits, 0 for none, from sizes that grow only as far as those before
  /// allow.
  template <class Measure>
  std::int64_t climb(std::int64_t first, std::int64_t last, const Measure& measure) {
    SizeSearch sizes(options(first, std::max(first, last), Start::probe));
    std::int64_t size = first;
    for (int round = 0; round < kMostRounds; ++round) {
      sizes.record(attempt(size, measure(size)));
      if (sizes.finished()) {
        break;
      }
      size = std::min(sizes.next(), whole(kGrowth * static_cast<double>(size)));
    }
    return sizes.best().value_or(0);
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
      order.resize(std::min<std::size_t>(order.size(), kChecked));
      const auto unknown = std::ranges::find_if(order, [&](std::size_t batch) {
        return !known_.contains(terms_of(trial.shapes[batch]));
      });
      const double most = most_expected(trial, needs);
      if (unknown == order.end() || near_ >= kMostMeasured) {
        return most;
      }
      ++near_;
      const BatchNeed need = learn_batch(trial, *unknown);
      if (need.out_of_memory || need.peak > search_.limit) {
        return std::max({need.peak, most_expected(trial, bounds_of(trial)), kOver * search_.limit});
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
    check_argument(most_held_ > 1,
                   "the work held no memory on the device: it must be the one it runs on");
    std::set<double> totals;  // that did not run out of memory
    std::vector<MemorySample> samples;
    for (const auto& [terms, need] : known_) {
      if (terms[kTotalTerm] > 0) {
        samples.push_back({terms[kTotalTerm], 0, need.peak, need.out_of_memory});
        if (!need.out_of_memory) {
          totals.insert(terms[kTotalTerm]);
        }
      }
    }
    FittedLimit fitted{batching::Cost::Kind::sum, total, std::nullopt, error_};
    if (totals.size() > 1) {
      fitted.model.emplace().fit(samples, SizeKind::size);
    }
    return fitted;
  }

  const FitSearch& search_;
  NeedBound bound_;
  std::map<Terms, BatchNeed> known_;
  double error_ = 0.0;      // by how much a batch needed more than its bound
  double most_held_ = 0.0;  // bytes
  std::size_t near_ = 0;    // the number of batches that were measured near the limit
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

void FitSearch::learn_alone(MemoryModel& model) const {
  std::vector<std::int64_t> lengths = by_size.sizes;
  std::erase(lengths, 0);  // what empty samples need is no bound
  lengths.erase(std::unique(lengths.begin(), lengths.end()), lengths.end());
  const auto between = [&](double low, double high) {
    const auto first = std::ranges::upper_bound(lengths, low);
    return std::span<const std::int64_t>(first,
                                         std::max(first, std::ranges::lower_bound(lengths, high)));
  };
  std::size_t at_jumps = 0;
  for (;;) {
    std::map<double, double> alone{{0.0, 1.0}};  // needs by length
    double fails = std::numeric_limits<double>::infinity();
    for (const MemorySample& sample : model.samples()) {
      if (sample.n == 1 && (sample.out_of_memory || sample.peak > limit)) {
        fails = std::min(fails, sample.length);
      } else if (sample.n == 1) {
        alone[sample.length] = sample.peak;
      }
    }
    alone.erase(alone.lower_bound(fails), alone.end());
    std::optional<std::int64_t> length;
    const double longest = alone.rbegin()->first;
    if (const auto open = between(longest, fails); !open.empty()) {
      const auto near = between(longest, kGrowth * longest);
      length = std::isfinite(fails) ? open[open.size() / 2]
               : near.empty()       ? open.front()
                                    : near.back();
    }
    for (auto high = std::next(alone.begin()); high != alone.end(); ++high) {
      const auto low = std::prev(high);
      if (const auto open = between(low->first, high->first);
          !length && !open.empty() && low->first > 0 && high->second > kHidden * low->second &&
          at_jumps < kMostAtJumps) {
        ++at_jumps;
        length = open[open.size() / 2];
      }
    }
    if (!length) {
      return;
    }
    const BatchNeed need = measure({&by_size.indices[by_size.end_of(*length) - 1], 1});
    std::vector<MemorySample> samples = model.samples();
    samples.push_back({1, static_cast<double>(*length),
                       need.out_of_memory ? std::max(need.peak, kOver * limit) : need.peak,
                       need.out_of_memory});
    model.fit(samples, SizeKind::batch, false);
  }
}

void FitSearch::check_padded(FittedLimit& fitted) const {
  MemoryModel& model = *fitted.model;
  learn_alone(model);
  std::set<std::pair<double, double>> measured;
  const auto learn = [&](std::span<const std::int64_t> batch, const BatchShape& shape) {
    const double length = std::max(shape.longest, 1.0);
    const BatchNeed need = measure(batch);
    const double expected = model.safe_peak(shape.count, length);
    const bool is_more = need.out_of_memory || need.peak > expected;
    fitted.error = std::max(fitted.error, is_more ? need.peak / expected - 1 : 0.0);
    if (is_more || shape.longest > 0) {  // what empty samples need is no bound
      std::vector<MemorySample> samples = model.samples();
      samples.push_back({shape.count, length, need.peak, need.out_of_memory});
      model.fit(samples, SizeKind::batch, false);
    }
    return need;
  };
  double smaller = kSmallerLimit;  // for a limit that was too large by an unknown amount
  for (int round = 0; round < kMostRounds; ++round) {
    const TrialBatches trial = this->trial(fitted);
    if (trial.shapes.empty()) {
      break;
    }
    const std::size_t known = measured.size();
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
      const BatchNeed need = learn(trial.batches[batch], trial.shapes[batch]);
      if (need.out_of_memory || need.peak > limit) {
        over = need;
        break;  // the remaining batches will not be made
      }
    }
    if (!over && (measured.size() == known || measured.size() >= kMostMeasured)) {
      break;  // else what was learned has changed the batches
    }
    if (!over) {
      continue;
    }
    if (measured.size() >= kMostMeasured / 2) {  // learning alone is not enough
      const double share = std::clamp(limit / over->peak, 1 / kGrowth, smaller);
      fitted.maximum = whole(static_cast<double>(fitted.maximum) * share);
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
