#include "fit/feature_weights.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "predict/least_squares.h"

namespace brim::detail {
namespace {

constexpr double kEnough = 0.5;  // share of the limit that shows the growth
constexpr std::size_t kMostInABatch = std::size_t{1} << 16;  // in a batch that is measured
constexpr std::size_t kGroups = 16;  // one sample in this many has most of a feature

using Row = std::vector<double>;

/// How much the need grew, and by which totals of the features.
struct Growth {
  Row totals;
  double bytes = 0;
};

class FeatureProbe {
 public:
  FeatureProbe(std::span<const std::int64_t> features, std::size_t columns, double limit,
               const MeasureBatch& measure)
      : features_(features), columns_(columns), limit_(limit), measure_(measure), means_(columns) {
    for (std::size_t i = 0; i < features.size(); ++i) {
      means_[i % columns] += static_cast<double>(features[i]) / static_cast<double>(samples());
    }
  }

  [[nodiscard]] const Row& means() const { return means_; }

  /// Along batches of samples that have most of a feature.
  [[nodiscard]] Growth growth_along(std::size_t feature) const {
    const std::vector<std::int64_t> group = richest_in(feature);
    std::optional<double> shorter;  // what half of the samples need
    for (std::size_t count = 1;; count *= 2) {
      const BatchNeed need = measure_(batch_of(group, count));
      if (need.out_of_memory) {
        return growth(group, count / 2, count, shorter ? limit_ - *shorter : limit_);
      }
      if (need.peak >= kEnough * limit_ || 2 * count > kMostInABatch) {
        const std::size_t more = count + (count + 1) / 2;
        const BatchNeed longer = measure_(batch_of(group, more));
        if (!longer.out_of_memory) {
          return growth(group, count, more, longer.peak - need.peak);
        }
        return growth(group, count / 2, count, need.peak - shorter.value_or(0.0));
      }
      shorter = need.peak;
    }
  }

 private:
  [[nodiscard]] std::size_t samples() const { return features_.size() / columns_; }
  [[nodiscard]] double feature_of(std::int64_t sample, std::size_t feature) const {
    return static_cast<double>(features_[static_cast<std::size_t>(sample) * columns_ + feature]);
  }

  [[nodiscard]] std::vector<std::int64_t> richest_in(std::size_t feature) const {
    std::vector<double> share(samples());
    for (std::size_t i = 0; i < share.size(); ++i) {
      double all = 0.0;
      for (std::size_t c = 0; c < columns_; ++c) {
        const double own = feature_of(static_cast<std::int64_t>(i), c);
        all += means_[c] > 0 ? own / means_[c] : 0.0;
      }
      const double own = feature_of(static_cast<std::int64_t>(i), feature) / means_[feature];
      share[i] = all > 0 ? own / all : 0.0;
    }
    std::vector<std::int64_t> order(samples());
    std::iota(order.begin(), order.end(), std::int64_t{0});
    std::ranges::stable_sort(order, std::ranges::greater(), [&](std::int64_t sample) {
      return share[static_cast<std::size_t>(sample)];
    });
    order.resize((samples() + kGroups - 1) / kGroups);
    return order;
  }

  static std::vector<std::int64_t> batch_of(const std::vector<std::int64_t>& group,
                                            std::size_t count) {
    std::vector<std::int64_t> batch(count);
    for (std::size_t i = 0; i < count; ++i) {
      batch[i] = group[i % group.size()];
    }
    return batch;
  }

  [[nodiscard]] Growth growth(const std::vector<std::int64_t>& group, std::size_t begin,
                              std::size_t end, double bytes) const {
    Growth result{Row(columns_), std::max(bytes, 0.0)};
    for (std::size_t i = begin; i < end; ++i) {
      for (std::size_t c = 0; c < columns_; ++c) {
        result.totals[c] += feature_of(group[i % group.size()], c);
      }
    }
    return result;
  }

  std::span<const std::int64_t> features_;
  std::size_t columns_;
  double limit_;
  const MeasureBatch& measure_;
  Row means_;
};

/// Weights that explain the growth best. If nothing grew, the mean of each feature counts the same.
Row solve(const std::vector<Growth>& rows, const Row& means) {
  Matrix totals(rows.size(), means.size());
  Row bytes;
  for (const Growth& row : rows) {
    std::ranges::copy(row.totals, &totals.at(bytes.size(), 0));
    bytes.push_back(row.bytes);
  }
  Row weights = solve_non_negative(totals, bytes);
  if (std::ranges::all_of(weights, [](double weight) { return weight == 0; })) {
    std::ranges::transform(means, weights.begin(),
                           [](double mean) { return mean > 0 ? 1 / mean : 0.0; });
  }
  return weights;
}

}  // namespace

std::vector<double> feature_weights(std::span<const std::int64_t> features, std::size_t columns,
                                    double limit, const MeasureBatch& measure) {
  const FeatureProbe probe(features, columns, limit, measure);
  const std::int64_t first = 0;
  (void)measure({&first, 1});  // makes what later calls find ready
  std::vector<Growth> rows;
  for (std::size_t c = 0; c < columns; ++c) {
    if (probe.means()[c] > 0) {
      rows.push_back(probe.growth_along(c));
    }
  }
  return solve(rows, probe.means());
}

}  // namespace brim::detail
