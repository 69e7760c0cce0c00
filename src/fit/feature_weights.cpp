#include "fit/fit_search.h"

#include <algorithm>
#include <numeric>

#include "fit/fit_constants.h"
#include "predict/least_squares.h"

namespace brim::detail {
namespace {

using Row = std::vector<double>;

/// Samples with features, `columns` of each.
struct Samples {
  std::span<const std::int64_t> features;
  std::size_t columns;

  [[nodiscard]] std::size_t count() const { return features.size() / columns; }
  [[nodiscard]] double at(std::int64_t sample, std::size_t column) const {
    return static_cast<double>(features[static_cast<std::size_t>(sample) * columns + column]);
  }
};

/// Those that have most of a feature in proportion to the others.
std::vector<std::int64_t> richest_in(std::size_t feature, const Samples& samples,
                                     const Row& means) {
  std::vector<std::int64_t> order(samples.count());
  std::iota(order.begin(), order.end(), std::int64_t{0});
  std::ranges::stable_sort(order, std::ranges::greater(), [&](std::int64_t sample) {
    double all = 0.0;
    for (std::size_t c = 0; c < samples.columns; ++c) {
      all += means[c] > 0 ? samples.at(sample, c) / means[c] : 0.0;
    }
    return all > 0 ? samples.at(sample, feature) / means[feature] / all : 0.0;
  });
  order.resize((samples.count() + kGroups - 1) / kGroups);
  return order;
}

/// How much the need grew, and by which totals of the features.
struct Growth {
  Row totals;
  double bytes = 0;
};

/// From one batch of the group to a longer one, near the limit.
Growth growth_along(const std::vector<std::int64_t>& group, const Samples& samples, double limit,
                    const MeasureBatch& measure) {
  std::vector<std::int64_t> batch;  // each sample of the group in turn, as often as it takes
  Growth growth;
  double before = 0.0;
  bool near = false;
  for (std::size_t count = 1;;) {
    growth.totals.assign(samples.columns, 0.0);
    while (batch.size() < count) {
      batch.push_back(group[batch.size() % group.size()]);
      for (std::size_t c = 0; c < samples.columns; ++c) {
        growth.totals[c] += samples.at(batch.back(), c);
      }
    }
    const BatchNeed need = measure(batch);
    growth.bytes = std::max((need.out_of_memory ? limit : need.peak) - before, 0.0);
    if (need.out_of_memory || near) {
      return growth;
    }
    before = need.peak;
    near = kGrowth * need.peak >= limit || 2 * count > kMostInABatch;
    count += near ? (count + 1) / 2 : count;
  }
}

/// Weights that explain the growth; those that would be negative are 0. If nothing grew, the mean
/// of each feature counts the same.
Row solve(const std::vector<Growth>& rows, const Row& means) {
  Row bytes;
  for (const Growth& row : rows) {
    bytes.push_back(row.bytes);
  }
  std::vector<std::size_t> columns(means.size());
  std::iota(columns.begin(), columns.end(), std::size_t{0});
  Row weights(means.size());
  while (!columns.empty()) {
    Matrix totals(rows.size(), columns.size());
    for (std::size_t i = 0; i < rows.size(); ++i) {
      for (std::size_t j = 0; j < columns.size(); ++j) {
        totals.at(i, j) = rows[i].totals[columns[j]];
      }
    }
    const Row found = solve_least_squares(totals, bytes).x;
    const auto least = std::ranges::min_element(found);
    if (*least >= 0) {
      for (std::size_t j = 0; j < columns.size(); ++j) {
        weights[columns[j]] = found[j];
      }
      break;
    }
    columns.erase(columns.begin() + (least - found.begin()));
  }
  if (std::ranges::all_of(weights, [](double weight) { return weight == 0; })) {
    std::ranges::transform(means, weights.begin(),
                           [](double mean) { return mean > 0 ? 1 / mean : 0.0; });
  }
  return weights;
}

}  // namespace

std::vector<double> feature_weights(std::span<const std::int64_t> features, std::size_t columns,
                                    double limit, const MeasureBatch& measure) {
  const Samples samples{features, columns};
  Row means(columns);
  for (std::size_t i = 0; i < features.size(); ++i) {
    means[i % columns] += static_cast<double>(features[i]) / static_cast<double>(samples.count());
  }
  const std::int64_t first = 0;
  (void)measure({&first, 1});  // makes what later calls find ready
  std::vector<Growth> rows;
  for (std::size_t c = 0; c < columns; ++c) {
    if (means[c] > 0) {
      rows.push_back(growth_along(richest_in(c, samples, means), samples, limit, measure));
    }
  }
  return solve(rows, means);
}

}  // namespace brim::detail
