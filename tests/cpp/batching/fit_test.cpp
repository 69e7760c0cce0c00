#include <ATen/ops/empty.h>
#include <brim/batching/stream.h>
#include <brim/fit/fit_batching.h>
#include <brim/fit/model_limit.h>
#include <brim/memory/cpu.h>
#include <brim/memory/stats.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <stdexcept>

#include "batching/reference.h"
#include "fit/feature_weights.h"
#include "fit/fit_search.h"

namespace brim {
namespace {

using namespace batching;
using namespace batching::reference;

Ints lengths_of(const Ints& lengths, std::span<const std::int64_t> batch) {
  Ints result;
  for (const std::int64_t index : batch) {
    result.push_back(lengths[static_cast<std::size_t>(index)]);
  }
  return result;
}

double longest_of(const Ints& lengths) {
  return static_cast<double>(*std::max_element(lengths.begin(), lengths.end()));
}

Ints log_normal_lengths(Random& random, std::size_t count) {
  std::lognormal_distribution<double> any(3.5, 0.7);
  Ints lengths(count);
  std::generate(lengths.begin(), lengths.end(),
                [&] { return std::clamp<std::int64_t>(std::llround(any(random)), 4, 200); });
  return lengths;
}

MakeBatching packed(const Ints& lengths, bool shuffle) {
  return [&lengths, shuffle](const FittedLimit& fitted) {
    return packed_batching(Columns<std::int64_t>{{lengths, fitted.limit()}}, {.shuffle = shuffle});
  };
}

/// The highest share of the limit that a batch of some epochs needs.
double highest_share(const Batching& batching, double limit,
                     const std::function<double(std::span<const std::int64_t>)>& need) {
  double highest = 0.0;
  for (std::uint64_t epoch = 0; epoch < 3; ++epoch) {
    BatchStream stream(batching, epoch_seed(1, epoch));
    while (const auto batch = stream.next()) {
      highest = std::max(highest, need(*batch) / limit);
    }
  }
  return highest;
}

// ---------------------------------------------------------------- the search, without torch

TEST(FitSearch, TotalsOfRandomProgramsStayWithinTheLimitAndFillIt) {
  Random random(1);
  for (int trial = 0; trial < 20; ++trial) {
    const Ints lengths = log_normal_lengths(random, 300);
    const double floor = 1e5 * std::exp2(static_cast<double>(any_int(random, 0, 4)));
    const auto each = static_cast<double>(any_int(random, 0, 50'000));
    const auto attention = static_cast<double>(any_int(random, 0, 1)) * 20.0;
    const auto need = [&](std::span<const std::int64_t> batch) {
      double bytes = 1e4 + each * static_cast<double>(batch.size());
      for (const std::int64_t length : lengths_of(lengths, batch)) {
        const auto size = static_cast<double>(length);
        bytes += 1000 * size + attention * size * size;
      }
      return std::max(floor, bytes);
    };
    const std::int64_t limit = 4'000'000;
    int runs = 0;
    const detail::MeasureBatch measure = [&](std::span<const std::int64_t> batch) {
      ++runs;
      return detail::BatchNeed{need(batch), false};
    };
    const detail::SamplesBySize samples(lengths);
    const MakeBatching make = packed(lengths, trial % 2 == 0);
    const FittedLimit fitted =
        detail::FitSearch{lengths, samples, static_cast<double>(limit), measure, make}
            .largest_total();
    const auto batching = make(fitted);
    const double share = highest_share(*batching, static_cast<double>(limit), need);
    EXPECT_LE(share, 1.0) << "trial " << trial;
    EXPECT_GE(share, 0.7) << "trial " << trial;
    EXPECT_TRUE(batching->left_out().empty());
    EXPECT_LT(runs, 100);
  }
}

TEST(FitSearch, PaddedModelLearnsFromBatchesThatNeedMoreThanItAllows) {
  Random random(2);
  const Ints lengths = log_normal_lengths(random, 500);
  // A step that no model of this kind expects, above all that the model has seen.
  const auto bytes_of = [](double n, double longest) {
    return (1e5 + 200 * n * longest) * (n * longest > 5000 ? 1.5 : 1.0);
  };
  const auto need = [&](std::span<const std::int64_t> batch) {
    return bytes_of(static_cast<double>(batch.size()), longest_of(lengths_of(lengths, batch)));
  };
  std::vector<MemorySample> few;
  for (const auto& [n, length] : {std::pair{1.0, 4.0}, {16.0, 4.0}, {1.0, 200.0}, {16.0, 200.0}}) {
    few.push_back({n, length, bytes_of(n, length), false});
  }
  FittedLimit fitted{Cost::Kind::padded, 3'000'000, MemoryModel()};
  fitted.model->fit(few, SizeKind::batch);
  const MakeBatching make = packed(lengths, true);
  EXPECT_GT(highest_share(*make(fitted), 3e6, need), 1.0);
  const detail::MeasureBatch measure = [&](std::span<const std::int64_t> batch) {
    return detail::BatchNeed{std::min(need(batch), 4e6), need(batch) > 4e6};
  };
  const detail::SamplesBySize samples(lengths);
  detail::FitSearch{lengths, samples, 3e6, measure, make}.check_padded(fitted);
  EXPECT_LE(highest_share(*make(fitted), 3e6, need), 1.0);
  EXPECT_GT(fitted.model->samples().size(), few.size());
}

TEST(FitSearch, PaddedLimitIsReducedInSmallStepsWhereMemoryRunsOutBelowIt) {
  Random random(5);
  const Ints lengths = log_normal_lengths(random, 20'000);
  const auto bytes_of = [](double n, double longest) {
    const double noise = 0.02 * std::sin(n + 7 * longest);
    return (1e5 + 200 * n * longest) * (1 + noise);
  };
  std::vector<MemorySample> few;
  for (const double n : {1.0, 3.0, 16.0, 40.0}) {
    for (const double length : {4.0, 30.0, 200.0}) {
      few.push_back({n, length, bytes_of(n, length), false});
    }
  }
  FittedLimit fitted{Cost::Kind::padded, 3'000'000, MemoryModel(), 0.02};
  fitted.model->fit(few, SizeKind::batch);
  int runs = 0;
  const detail::MeasureBatch measure = [&](std::span<const std::int64_t> batch) {
    const double need =
        bytes_of(static_cast<double>(batch.size()), longest_of(lengths_of(lengths, batch)));
    return detail::BatchNeed{need, ++runs == 18};  // once, blocks of other work are in the way
  };
  const MakeBatching make = packed(lengths, true);
  const detail::SamplesBySize samples(lengths);
  detail::FitSearch{lengths, samples, 3e6, measure, make}.check_padded(fitted);
  EXPECT_GT(runs, 18);
  EXPECT_GE(fitted.maximum, 2'700'000);
}

// ---------------------------------------------------------------- real work

struct FitBatching : ::testing::TestWithParam<Cost::Kind> {
  void SetUp() override { install_cpu_allocator(); }
};

TEST_P(FitBatching, FillsABudgetOfTheCpuAndStaysUnderIt) {
  const bool padded = GetParam() == Cost::Kind::padded;
  Random random(3);
  const Ints lengths = log_normal_lengths(random, 400);
  std::int64_t runs = 0;
  const auto bytes_of = [&](std::span<const std::int64_t> batch) {
    const Ints some = lengths_of(lengths, batch);
    const Cost::Kind kind = padded ? Cost::Kind::padded : Cost::Kind::sum;
    return 10'000 + 512 * static_cast<std::int64_t>(cost_of(kind, some));
  };
  const BatchWork work = [&](std::span<const std::int64_t> batch) {
    ++runs;
    at::empty({bytes_of(batch)}, at::kByte);
  };
  const std::int64_t held = memory_stats(at::kCPU).allocated;
  const std::int64_t budget = held + (std::int64_t{2} << 20);
  const MakeBatching make = packed(lengths, true);
  const FittedLimit fitted =
      fit_batching(lengths, work, make, {.budget = budget, .cost = GetParam(), .device = at::kCPU});
  EXPECT_TRUE(fitted.model.has_value());
  EXPECT_LT(fitted.error, 0.25);
  EXPECT_LT(runs, 100);
  const auto batching = make(fitted);
  EXPECT_TRUE(batching->left_out().empty());
  const double share =
      highest_share(*batching, static_cast<double>(budget - held),
                    [&](auto batch) { return static_cast<double>(bytes_of(batch)); });
  EXPECT_LE(share, 1.0);
  EXPECT_GE(share, 0.85);
}

INSTANTIATE_TEST_SUITE_P(Costs, FitBatching, ::testing::Values(Cost::Kind::padded, Cost::Kind::sum),
                         [](const auto& kind) {
                           return kind.param == Cost::Kind::padded ? "Padded" : "Sum";
                         });

TEST(FitBatchingArguments, WrongOnesAreErrorsThatNameThem) {
  install_cpu_allocator();
  const Ints lengths{3, 5, 4};
  const MakeBatching make = packed(lengths, false);
  const BatchWork work = [](std::span<const std::int64_t>) { at::empty({4096}, at::kByte); };
  const auto fit = [&](const Ints& sizes, FitOptions options) {
    options.device = at::kCPU;
    return [&, sizes, options] { (void)fit_batching(sizes, work, make, options); };
  };
  expect_message(fit({}, {.budget = 1 << 20}), {"sizes is empty"});
  expect_message(fit({3, -2}, {.budget = 1 << 20}), {"negative", "got -2 at index 1"});
  expect_message(fit(lengths, {.budget = 0}), {"budget must be positive, got 0"});
  expect_message(fit(lengths, {.budget = std::int64_t{1} << 62}), {"budget must not exceed"});
  expect_message(fit(lengths, {.budget = 1 << 20, .cost = Cost::Kind::count}), {"padded or sum"});
}

TEST(FitBatchingArguments, ErrorOfTheWorkComesThrough) {
  install_cpu_allocator();
  const Ints lengths{3, 5, 4};
  const BatchWork work = [](std::span<const std::int64_t>) { throw std::out_of_range("mine"); };
  EXPECT_THROW((void)fit_batching(lengths, work, packed(lengths, false),
                                  {.budget = 1 << 20, .device = at::kCPU}),
               std::out_of_range);
}

// ---------------------------------------------------------------- a model as a cost

TEST(ModelLimit, BatchesStayWithinTheBytesThatTheModelPredicts) {
  MemoryModel model;
  model.fit(
      std::vector<MemorySample>{
          {1, 10, 2e5, false}, {8, 100, 1e6, false}, {32, 50, 2e6, false}, {64, 200, 1.4e7, false}},
      SizeKind::batch);
  Random random(4);
  const Ints lengths = log_normal_lengths(random, 500);
  const auto batching =
      packed_batching(Columns<std::int64_t>{{lengths, model_limit(model, 5'000'000)}});
  const double share = highest_share(*batching, 5e6, [&](auto batch) {
    return model.safe_peak(static_cast<double>(batch.size()),
                           longest_of(lengths_of(lengths, batch)));
  });
  EXPECT_LE(share, 1.0);
  EXPECT_GE(share, 0.9);
}

TEST(ModelLimit, ModelOfOneSizeLimitsTheSum) {
  MemoryModel model;
  model.fit(std::vector<MemorySample>{{10, 0, 1100, false}, {100, 0, 2000, false}}, SizeKind::size);
  const Limit limit = model_limit(model, 1500);
  EXPECT_EQ(limit.cost().kind(), Cost::Kind::sum);
  EXPECT_EQ(limit.whole(), model.largest_size(1500));
  expect_message([&] { (void)model_limit(model, 900); }, {"900 bytes", "total size 1"});
  expect_message([] { (void)model_limit(MemoryModel(), 900); }, {"has not been fitted"});
}

/// Graphs of which some have many edges for each node and some have few.
Ints graphs(Random& random, std::size_t count) {
  Ints features;
  for (std::size_t i = 0; i < count; ++i) {
    const std::int64_t nodes = any_int(random, 5, 60);
    features.push_back(nodes);
    features.push_back(nodes * any_int(random, 0, 30));
  }
  return features;
}

TEST(FeatureWeights, AreWhatEachFeatureAddsAboveAFloor) {
  Random random(4);
  const Ints features = graphs(random, 300);
  const std::function<double(double, double)> needs[] = {
      [](double nodes, double edges) { return 1e4 + 70 * nodes + 9 * edges; },
      [](double nodes, double edges) { return std::max(2e5, 70 * nodes + 9 * edges); },
      [](double nodes, double /*edges*/) { return 100 + 70 * nodes; },
      [](double /*nodes*/, double edges) { return 100 + 9 * edges; }};
  const std::vector<Doubles> expected{{70, 9}, {70, 9}, {70, 0}, {0, 9}};
  for (std::size_t i = 0; i < expected.size(); ++i) {
    int measured = 0;
    const Doubles weights = detail::feature_weights(
        features, 2, 1e6, [&](std::span<const std::int64_t> batch) -> detail::BatchNeed {
          double nodes = 0;
          double edges = 0;
          for (const std::int64_t sample : batch) {
            nodes += static_cast<double>(features[2 * static_cast<std::size_t>(sample)]);
            edges += static_cast<double>(features[2 * static_cast<std::size_t>(sample) + 1]);
          }
          ++measured;
          const double need = needs[i](nodes, edges);
          return {std::min(need, 2e6), need > 2e6};
        });
    EXPECT_NEAR(weights[0], expected[i][0], 0.5) << "need " << i;
    EXPECT_NEAR(weights[1], expected[i][1], 0.05) << "need " << i;
    EXPECT_LE(measured, 40);
  }
}

TEST(FitBatching, SizesOfTwoFeaturesFillTheBudget) {
  install_cpu_allocator();
  Random random(5);
  const Ints features = graphs(random, 300);
  const auto held = memory_stats(at::kCPU).allocated;
  const auto bytes_of = [&](std::span<const std::int64_t> batch) {
    std::int64_t bytes = 0;
    for (const std::int64_t sample : batch) {
      const auto at = 2 * static_cast<std::size_t>(sample);
      bytes += 512 * features[at] + 64 * features[at + 1];
    }
    return bytes;
  };
  const BatchWork work = [&](std::span<const std::int64_t> batch) {
    const at::Tensor need = at::empty({bytes_of(batch)}, at::kByte);
  };
  const FitOptions options{.budget = held + (1 << 21), .cost = Cost::Kind::sum, .device = at::kCPU};
  const std::vector<double> weights = fit_weights(features, 2, work, options);
  EXPECT_NEAR(weights[0] / weights[1], 8.0, 0.1);
  const Ints sizes = combined_sizes(features, weights);
  const MakeBatching make = packed(sizes, true);
  const FittedLimit fitted = fit_batching(sizes, work, make, options);
  const double highest = highest_share(
      *make(fitted), 1 << 21, [&](auto batch) { return static_cast<double>(bytes_of(batch)); });
  EXPECT_LE(highest, 1.0);
  EXPECT_GE(highest, 0.93);
}

}  // namespace
}  // namespace brim
