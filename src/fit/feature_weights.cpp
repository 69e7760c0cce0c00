#include "fit/feature_weights.h"

#include <algorithm>
#include <numeric>
#include <optional>

namespace brim::detail {
namespace {

constexpr double kEnough = 0.5;  // share of the limit that shows the growth
constexpr std::size_t kMostInABatch = std::size_t{1} << 16;  // in a batch that is measured
constexpr std::size_t kGroups = 16;  // one sample in this many has most of a feature
constexpr int kSweeps = 10'000;

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
    std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
      return share[static_cast<std::size_t>(a)] > share[static_cast<std::size_t>(b)];
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

/// Least squares with weights that are not negative, by going to the best value of one weight after
/// the other. `scale` is about how large a feature is.
Row solve(const std::vector<Growth>& rows, const Row& scale) {
  Row weights(scale.size());  // of a feature in units of its scale
  Row left;                   // bytes that are not explained yet
  for (const Growth& row : rows) {
    left.push_back(row.bytes);
  }
  for (int sweep = 0; sweep < kSweeps; ++sweep) {
    for (std::size_t c = 0; c < weights.size(); ++c) {
      double along = 0.0;
      double squares = 0.0;
      for (std::size_t r = 0; r < rows.size(); ++r) {
        const double total = scale[c] > 0 ? rows[r].totals[c] / scale[c] : 0.0;
        along += total * left[r];
        squares += total * total;
      }
      const double step = squares > 0 ? std::max(along / squares, -weights[c]) : 0.0;
      weights[c] += step;
      for (std::size_t r = 0; r < rows.size() && step != 0; ++r) {
        left[r] -= step * rows[r].totals[c] / scale[c];
      }
    }
  }
  const bool none = std::all_of(weights.begin(), weights.end(), [](double w) { return w == 0; });
  for (std::size_t c = 0; c < weights.size(); ++c) {
    weights[c] = scale[c] > 0 ? (none ? 1.0 : weights[c]) / scale[c] : 0.0;
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
