#include "fit/padded_search.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "check_argument.h"
#include "predict/least_squares.h"

namespace brim::detail {
namespace {

/// n samples, padded to the longest of each size.
struct PaddedShape {
  double n = 0;
  std::array<double, PaddedNeed::kMostSizes> longest{};
  auto operator<=>(const PaddedShape&) const = default;
};

class PaddedSearch {
 public:
  PaddedSearch(const FitSearch& search, std::span<const std::int64_t> features, std::size_t columns)
      : search_(search), features_(features), columns_(columns) {}

  [[nodiscard]] FittedLimit run(std::int64_t probes) {
    probe(probes);
    check_argument(most_held_ > 1,
                   "the work held no memory on the device: it must be the one it runs on");
    check_argument(!bound_is_empty_, "budget is too small: even the smallest sample ran out of it");
    PaddedNeed need = estimate();
    double maximum = largest(need);
    while (maximum > 0 && check(read(need, maximum), need)) {
      need = estimate();
      maximum = largest(need);
    }
    FittedLimit fitted{batching::Cost::Kind::padded, static_cast<std::int64_t>(maximum),
                       std::nullopt, error_};
    fitted.need = std::move(need);
    return fitted;
  }

 private:
  static constexpr std::size_t kMostMeasured = 32;  // of a batching's own batches
  static constexpr std::size_t kMostChecked = 16;   // beside these
  static constexpr std::size_t kAtOnce = 4;
  static constexpr int kMostRounds = 64;
  static constexpr std::size_t kMostCopies = std::size_t{1} << 16;  // in a batch that is measured
  static constexpr double kAim = 0.995;
  static constexpr double kClose = 1.01;
  static constexpr double kUsedUp = 0.96;
  static constexpr double kMostGrowth = 2;
  // The needs of batches of like sizes differ by this share, depending on the order of samples.
  static constexpr double kLikely = 0.005;
  // More shapes than this are bounded in groups, whose sizes differ by about this share.
  static constexpr std::size_t kManyShapes = 1024;
  static constexpr double kGroup = 1.0 / 64;

  struct Trial {
    TrialBatches batches;
    std::vector<PaddedShape> shapes;
    std::vector<double> needs;  // at most, in bytes
  };

  /// The largest limit whose batches are expected to stay within the budget, 0 for none. Batches
  /// are measured, from which `need` learns.
  [[nodiscard]] double largest(PaddedNeed& need) {
    double good = 0.0;
    double bad = 0.0;  // 0 as long as there is none
    double maximum = search_.limit;
    for (int round = 0; round < kMostRounds; ++round) {
      const Trial trial = read(need, maximum);
      if (trial.shapes.empty()) {
        break;
      }
      const double most = most_expected(trial);
      const std::size_t left = measured_ < kMostMeasured ? kMostMeasured - measured_ : 0;
      const std::size_t learned =
          most > search_.limit ? learn_from(trial, need, std::min(left, kAtOnce)) : 0;
      if (learned > 0) {
        measured_ += learned;
        need = estimate();
        // What was found for another estimate does not hold for this one.
        good = bad = 0.0;
        maximum = search_.limit;
      } else if (most > search_.limit) {
        bad = maximum;
        maximum = good > 0 ? (good + bad) / 2
                           : maximum * std::clamp(kAim * search_.limit / most, 0.5, 0.99);
        if (good > 0 && bad < kClose * good) {
          break;
        }
      } else {
        good = maximum;
        const double growth = std::min(kAim * search_.limit / most, kMostGrowth);
        if (growth < kClose || (bad > 0 && bad < kClose * good)) {
          // A bound may be far above the need: what comes closest to the budget is measured too.
          const std::size_t checked = learn_from(trial, need, std::min(left, kAtOnce));
          if (checked == 0 || latest_most_ > kUsedUp * search_.limit) {
            break;
          }
          measured_ += checked;
          need = estimate();
          good = bad = 0.0;
          maximum = search_.limit;
          continue;
        }
        maximum = bad > 0 ? std::min((good + bad) / 2, growth * good) : growth * good;
      }
    }
    return good;
  }

  /// Bounds rest on needs that grow as the terms do, which no kernel has promised. So the batches
  /// that are least like any that was measured are measured too, until one exceeds the budget.
  /// Returns whether one did.
  [[nodiscard]] bool check(const Trial& trial, const PaddedNeed& estimate) {
    std::vector<double> likeness(trial.shapes.size(), std::numeric_limits<double>::infinity());
    const auto compare = [&](const PaddedShape& known, double peak) {
      for (std::size_t b = 0; b < likeness.size(); ++b) {
        likeness[b] = std::min(likeness[b], peak * growth(known, trial.shapes[b]));
      }
    };
    for (const auto& [shape, need] : known_) {
      compare(shape, need.peak);
    }
    for (; checked_ < kMostChecked; ++checked_) {
      const auto farthest = std::ranges::max_element(likeness);
      if (*farthest <= search_.limit) {
        break;  // no batch needs more, as it needs no more than a larger one
      }
      const auto b = static_cast<std::size_t>(farthest - likeness.begin());
      const BatchNeed need = measure(trial.batches.batches[b]);
      note_surprise(trial.shapes[b], need, estimate);
      if (need.out_of_memory || need.peak > search_.limit) {
        ++checked_;
        return true;
      }
      compare(trial.shapes[b], need.peak);
      likeness[b] = 0.0;
    }
    return false;
  }

  /// The most by which any term grows from one shape to the other.
  [[nodiscard]] double growth(const PaddedShape& from, const PaddedShape& to) const {
    const auto before = terms_of(from);
    const auto after = terms_of(to);
    double most = is_bounded_by(to, from) ? 1.0 : std::numeric_limits<double>::infinity();
    for (std::size_t j = 0; j < after.size(); ++j) {
      if (after[j] > 0) {
        most = std::max(most, after[j] / before[j]);
      }
    }
    return most;
  }

  [[nodiscard]] double feature(std::int64_t sample, std::size_t column) const {
    return static_cast<double>(features_[static_cast<std::size_t>(sample) * columns_ + column]);
  }
  [[nodiscard]] std::span<const double> sizes_of(const PaddedShape& shape) const {
    return std::span(shape.longest).first(columns_);
  }
  [[nodiscard]] JointNeedBound::Terms terms_of(const PaddedShape& shape) const {
    return PaddedNeed::terms(shape.n, sizes_of(shape));
  }
  [[nodiscard]] PaddedShape shape_of(std::span<const std::int64_t> batch) const {
    PaddedShape shape{.n = static_cast<double>(batch.size())};
    for (const std::int64_t sample : batch) {
      for (std::size_t c = 0; c < columns_; ++c) {
        shape.longest[c] = std::max(shape.longest[c], feature(sample, c));
      }
    }
    return shape;
  }

  /// The dimensions that are 1, as bits. Such a dimension has kernels of its own (einsum drops it,
  /// a product of matrices becomes one of vectors), which hold less: they say nothing of larger
  /// ones.
  [[nodiscard]] unsigned ones_of(const PaddedShape& shape) const {
    unsigned ones = shape.n <= 1 ? 1U << columns_ : 0U;
    for (std::size_t c = 0; c < columns_; ++c) {
      ones |= shape.longest[c] <= 1 ? 1U << c : 0U;
    }
    return ones;
  }
  [[nodiscard]] bool is_bounded_by(const PaddedShape& shape, const PaddedShape& known) const {
    return (ones_of(known) & ~ones_of(shape)) == 0;
  }
  [[nodiscard]] double bound_of(const PaddedShape& shape) const {
    return bounds_[ones_of(shape)].at(terms_of(shape));
  }

  BatchNeed measure(std::span<const std::int64_t> batch) {
    const PaddedShape shape = shape_of(batch);
    const BatchNeed need = known_[shape] = search_.measure(batch);
    // As a share of the budget: what a small batch needs beyond its bound, such as a library's
    // workspace, says little about batches that are full.
    const double excess = need.peak - bound_of(shape);
    error_ = std::max(error_, excess / std::max(need.peak, search_.limit));
    most_held_ = std::max(most_held_, need.peak);
    if (!need.out_of_memory) {
      for (unsigned ones = 0; ones < bounds_.size(); ++ones) {
        if ((ones_of(shape) & ~ones) == 0) {  // as is_bounded_by
          bounds_[ones].add(terms_of(shape), need.peak);
        }
      }
      bound_is_empty_ = false;
    }
    return need;
  }

  /// Samples that are extreme in some respect, the smallest first.
  [[nodiscard]] std::vector<std::int64_t> representative_samples(std::int64_t probes) const {
    std::vector<double> means(columns_);
    const std::size_t count = features_.size() / columns_;
    for (std::size_t i = 0; i < features_.size(); ++i) {
      means[i % columns_] += static_cast<double>(features_[i]) / static_cast<double>(count);
    }
    std::vector<double> sums(count);  // of the sizes, each as a multiple of its mean
    for (std::size_t i = 0; i < features_.size(); ++i) {
      sums[i / columns_] += static_cast<double>(features_[i]) / std::max(means[i % columns_], 1.0);
    }
    std::vector<std::int64_t> ascending(count);
    std::iota(ascending.begin(), ascending.end(), std::int64_t{0});
    const auto sum_of = [&](std::int64_t i) { return sums[static_cast<std::size_t>(i)]; };
    std::ranges::stable_sort(ascending, {}, sum_of);
    std::vector<std::int64_t> chosen{ascending.front(), ascending.back(), ascending[count / 2]};
    const auto most = [&](std::span<const std::int64_t> of, const auto& key) {
      return *std::ranges::max_element(of, {}, key);
    };
    const auto larger = std::span(ascending).subspan(count / 2);
    for (std::size_t c = 0; c < columns_; ++c) {
      chosen.push_back(
          most(larger, [&](auto i) { return feature(i, c) / std::max(sum_of(i), 1e-9); }));
    }
    for (std::size_t c = 0; c < columns_; ++c) {
      chosen.push_back(most(ascending, [&](auto i) { return feature(i, c); }));
    }
    chosen.push_back(ascending[count / 4]);
    chosen.push_back(ascending[count - 1 - count / 4]);
    std::vector<std::int64_t> distinct;
    for (const std::int64_t sample : chosen) {
      const auto same = [&](std::int64_t other) {
        return std::equal(&features_[static_cast<std::size_t>(sample) * columns_],
                          &features_[static_cast<std::size_t>(sample) * columns_] + columns_,
                          &features_[static_cast<std::size_t>(other) * columns_]);
      };
      if (std::cmp_less(distinct.size(), std::max<std::int64_t>(probes, 2)) &&
          std::ranges::none_of(distinct, same)) {
        distinct.push_back(sample);
      }
    }
    std::ranges::stable_sort(distinct, {}, sum_of);
    return distinct;
  }

  /// Batches of copies of some samples: one copy, about half the budget, and nearly all of it.
  void probe(std::int64_t probes) {
    const std::vector<std::int64_t> samples = representative_samples(probes);
    const std::int64_t smallest = samples.front();
    (void)search_.measure({&smallest, 1});  // makes what later calls find ready
    for (const std::int64_t sample : samples) {
      std::size_t count = 1;
      double before = least_;
      std::size_t of = 0;  // copies
      for (const double share : {0.5, 0.95, 0.0}) {
        const std::vector<std::int64_t> batch(count, sample);
        const BatchNeed need = measure(batch);
        if (need.out_of_memory || need.peak > search_.limit) {
          if (count < 4) {
            break;
          }
          count = of + (count - of) / 4;
        } else {
          least_ = std::min(least_, need.peak);
          before = std::min(before, need.peak);
          // How much a copy adds, from the last two batches.
          const double each = std::max((need.peak - before) / static_cast<double>(count - of), 1.0);
          const double more = (share * search_.limit - need.peak) / each;
          of = count;
          before = need.peak;
          count +=
              static_cast<std::size_t>(std::clamp(more, 1.0, static_cast<double>(kMostCopies) / 2));
        }
        if (share == 0.0 || count <= of) {
          break;
        }
      }
    }
  }

  /// The weights that explain the measurements best, those near the budget above all. One with a
  /// dimension of 1 holds less than the terms say, and a batch that ran out of memory needs more
  /// than was seen: they count if less is expected of them.
  [[nodiscard]] PaddedNeed estimate() const {
    std::vector<std::pair<PaddedShape, double>> points;
    const auto counts = [&](const PaddedShape& shape, const BatchNeed& need) {
      return !need.out_of_memory && ones_of(shape) == 0;
    };
    for (const auto& [shape, need] : known_) {
      if (counts(shape, need)) {
        points.emplace_back(shape, need.peak);
      }
    }
    const PaddedNeed result = explained(points);
    const std::size_t counted = points.size();
    for (const auto& [shape, need] : known_) {
      if (!counts(shape, need) && result.at(shape.n, sizes_of(shape)) < need.peak) {
        points.emplace_back(shape, need.peak);
      }
    }
    return points.size() > counted ? explained(points) : result;
  }

  [[nodiscard]] PaddedNeed explained(
      const std::vector<std::pair<PaddedShape, double>>& points) const {
    const std::size_t terms = PaddedNeed::term_names(columns_).size();
    Matrix a(points.size(), terms);
    std::vector<double> b;
    std::vector<double> units(terms, 0.0);
    for (const auto& [shape, peak] : points) {
      const auto row = terms_of(shape);
      // An error counts as a share of the budget; of a batch beyond that, as a share of its own.
      const double unit = std::max(peak, search_.limit);
      for (std::size_t j = 0; j < terms; ++j) {
        a.at(b.size(), j) = row[j] / unit;
        units[j] = std::max(units[j], row[j] / unit);
      }
      b.push_back(peak / unit);
    }
    // In units in which the largest figure of each column is 1: the solver must see all terms.
    for (std::size_t i = 0; i < a.rows; ++i) {
      for (std::size_t j = 0; j < terms; ++j) {
        a.at(i, j) /= units[j] > 0 ? units[j] : 1.0;
      }
    }
    std::vector<double> weights = solve_non_negative(a, b);
    for (std::size_t j = 0; j < terms; ++j) {
      weights[j] = units[j] > 0 ? weights[j] / units[j] : 0.0;
    }
    return {columns_, std::move(weights)};
  }

  [[nodiscard]] Trial read(const PaddedNeed& need, double maximum) const {
    FittedLimit fitted{batching::Cost::Kind::padded, static_cast<std::int64_t>(maximum)};
    fitted.need = need;
    Trial trial{search_.trial(fitted), {}, {}};
    std::map<PaddedShape, double> bounds;
    const std::size_t count = trial.batches.shapes.size();
    for (std::size_t b = 0; b < count; ++b) {
      const PaddedShape shape = shape_of(trial.batches.batches[b]);
      trial.shapes.push_back(shape);
      const auto found = known_.find(shape);
      if (found != known_.end()) {
        trial.needs.push_back(found->second.peak);
        continue;
      }
      PaddedShape rounded = shape;
      for (std::size_t c = 0; c < columns_ && count > kManyShapes; ++c) {
        if (shape.longest[c] > 0) {
          rounded.longest[c] = std::exp2(std::ceil(std::log2(shape.longest[c]) / kGroup) * kGroup);
        }
      }
      const auto [bound, added] = bounds.try_emplace(rounded, 0.0);
      if (added) {
        bound->second = most_needed(rounded, need);
      }
      trial.needs.push_back(bound->second);
    }
    return trial;
  }

  /// What the shape can need: less than its bound allows if the estimate has proved to be right. It
  /// is tested on batches that it has not seen, and of those that were made on the ones with the
  /// highest bounds.
  [[nodiscard]] double most_needed(const PaddedShape& shape, const PaddedNeed& estimate) const {
    double foreseen = std::numeric_limits<double>::infinity();
    if (std::ssize(surprises_) >= kTested) {
      const auto latest = surprises_.end() - std::min(2 * kTested, std::ssize(surprises_));
      const double worst = *std::max_element(latest, surprises_.end());
      foreseen = (1 + kLikely + kTimesSurprise * worst) * estimate.at(shape.n, sizes_of(shape));
      if (foreseen <= kLeast * search_.limit) {
        return foreseen;  // the bound would make no difference
      }
    }
    return std::min(foreseen, (1 + kLikely + 1.5 * error_) * bound_of(shape));
  }

  void note_surprise(const PaddedShape& shape, const BatchNeed& need, const PaddedNeed& estimate) {
    const double expected = estimate.at(shape.n, sizes_of(shape));
    surprises_.push_back(std::max(need.peak / expected - 1, 0.0));
  }

  /// Epochs to come differ from these as these do from each other.
  [[nodiscard]] double most_expected(const Trial& trial) const {
    std::map<std::size_t, double> of_epoch;
    for (std::size_t b = 0; b < trial.needs.size(); ++b) {
      double& highest = of_epoch[trial.batches.shapes[b].epoch];
      highest = std::max(highest, trial.needs[b]);
    }
    const auto [least, most] =
        std::minmax_element(of_epoch.begin(), of_epoch.end(),
                            [](const auto& a, const auto& b) { return a.second < b.second; });
    return std::isfinite(most->second) ? 2 * most->second - least->second : most->second;
  }

  /// Measures the batches with the highest bounds. Returns how many were not known.
  std::size_t learn_from(const Trial& trial, const PaddedNeed& estimate, std::size_t most) {
    std::vector<std::size_t> order(trial.needs.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::stable_sort(order, std::ranges::greater(),
                             [&](std::size_t b) { return trial.needs[b]; });
    std::size_t learned = 0;
    latest_most_ = 0.0;
    for (const std::size_t b : order) {
      if (learned == most || trial.needs[b] <= kLeast * search_.limit) {
        break;
      }
      if (!known_.contains(trial.shapes[b])) {
        ++learned;
        // One that needs too much says that the estimate is wrong: the others are made no more.
        const BatchNeed need = measure(trial.batches.batches[b]);
        latest_most_ = std::max(latest_most_, need.peak);
        note_surprise(trial.shapes[b], need, estimate);
        if (need.peak > search_.limit) {
          break;
        }
      }
    }
    return learned;
  }

  static constexpr double kLeast = 0.97;  // share of the budget that makes a batch worth measuring
  // An estimate is trusted after this many batches, to this many times what it missed of any of the
  // latest (with 2 and half as many of the latest, one network of 97 was 1.5 % over).
  static constexpr std::ptrdiff_t kTested = 12;
  static constexpr double kTimesSurprise = 3;

  const FitSearch& search_;
  std::span<const std::int64_t> features_;
  std::size_t columns_;
  std::array<JointNeedBound, 2U << PaddedNeed::kMostSizes> bounds_;  // by ones_of()
  bool bound_is_empty_ = true;
  std::map<PaddedShape, BatchNeed> known_;
  std::size_t measured_ = 0;       // of a batching's own batches
  std::size_t checked_ = 0;        // of them at the end
  double error_ = 0.0;             // by how much a batch needed more than its bound
  std::vector<double> surprises_;  // by how much a batch needed more than was estimated before
  double latest_most_ = 0.0;       // bytes, by the batches that were measured last
  double most_held_ = 0.0;         // bytes
  double least_ = std::numeric_limits<double>::infinity();  // bytes, by any batch
};

}  // namespace

FittedLimit fit_padded_sizes(const FitSearch& search, std::span<const std::int64_t> features,
                             std::size_t columns, std::int64_t probes) {
  return PaddedSearch(search, features, columns).run(probes);
}

}  // namespace brim::detail
