#include <brim/batching/plan.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "batching/reference.h"
#include "batching/stream_cases.h"

namespace brim::batching {
namespace {

using namespace reference;

TEST(PlanReport, NumbersAreThoseOfTheStreams) {
  Random random(1);
  for (int trial = 0; trial < 150; ++trial) {
    const auto some = random_case(random, trial % 3 == 0 ? 4000 : 300);
    const std::int64_t world_size = any_int(random, 1, 6);
    SCOPED_TRACE(some->name + " on " + std::to_string(world_size));
    std::vector<BatchStream> streams = start(*some->batching, 5, world_size);
    const JobRun run = read(streams);
    double loads = 0.0;
    double sizes = 0.0;
    double padded = 0.0;
    double excess = 0.0;
    std::int64_t samples = 0;
    const std::size_t steps = run.ranks[0].size();
    for (std::size_t step = 0; step < steps; ++step) {
      Doubles work;
      for (const Lists& rank : run.ranks) {
        const BatchFigures figures = some->batching->figures(rank[step]);
        loads += figures.load;
        sizes += figures.sizes;
        padded += figures.padded;
        work.push_back(figures.work);
        samples += std::ssize(rank[step]);
      }
      double mean = 0.0;
      for (const double of_rank : work) {
        mean += of_rank / static_cast<double>(world_size);
      }
      excess += mean > 0 ? *std::max_element(work.begin(), work.end()) / mean - 1 : 0.0;
    }
    const PlanReport plan = report(*some->batching, 5, world_size);
    EXPECT_EQ(plan.samples, some->batching->samples());
    EXPECT_EQ(plan.batched, samples);
    EXPECT_EQ(plan.batches, static_cast<std::int64_t>(steps) * world_size);
    EXPECT_EQ(plan.world_size, world_size);
    EXPECT_EQ(plan.samples, plan.batched + std::ssize(plan.left_out));
    const double batches = std::max<double>(1.0, static_cast<double>(plan.batches));
    EXPECT_NEAR(plan.fill, loads / batches, 1e-9);
    EXPECT_LE(plan.fill, 1 + 1e-12);
    EXPECT_NEAR(plan.padding, padded > 0 ? 1 - sizes / padded : 0.0, 1e-9);
    EXPECT_NEAR(plan.imbalance, excess / std::max<double>(1.0, static_cast<double>(steps)), 1e-9);
    std::vector<LeftOut> left_out = some->batching->left_out();
    left_out.insert(left_out.end(), run.left_out.begin(), run.left_out.end());
    EXPECT_EQ(plan.left_out, left_out);
  }
}

TEST(PlanReport, FiguresOfABatchAreTheSumsOfItsSizes) {
  const Ints nodes{3, 1, 2, 10};
  const Ints edges{5, 9, 1, 0};
  const auto batching =
      ordered_batching(Columns<std::int64_t>{{nodes, Limit(Cost::sum(), std::int64_t{20})},
                                             {edges, Limit(Cost::padded(), std::int64_t{30})}});
  const Ints batch{0, 1, 2};
  const BatchFigures figures = batching->figures(batch);
  EXPECT_DOUBLE_EQ(figures.load, 27.0 / 30);  // the edges: 3 of 9; the nodes use 6 of 20
  EXPECT_DOUBLE_EQ(figures.work, 27.0 / 30);
  EXPECT_DOUBLE_EQ(figures.sizes, 6.0);
  EXPECT_DOUBLE_EQ(figures.padded, 9.0);
}

TEST(PlanReport, HistogramsCountBatchesByTheirShares) {
  const Ints sizes{10, 1, 9, 4, 40};  // batches {10}, {1, 9}, {4}, and 40 by itself
  const auto batching = ordered_batching(
      Columns<std::int64_t>{{sizes, Limit(Cost::sum(), std::int64_t{10})}}, {}, Oversize::alone);
  const PlanReport plan = report(*batching, 0);
  ShareHistogram fill{};
  fill[8] = 1;   // 40 %
  fill[19] = 2;  // 100 %
  fill[20] = 1;  // 400 %
  EXPECT_EQ(plan.fill_histogram, fill);
  ShareHistogram padding{};
  padding[0] = 3;
  padding[8] = 1;  // 8 of 18
  EXPECT_EQ(plan.padding_histogram, padding);
}

TEST(PlanReport, RanksOfManyBatchesAreBalanced) {
  Random random(2);
  std::lognormal_distribution<double> length(5.7, 0.6);
  Ints sizes(50'000);
  std::generate(sizes.begin(), sizes.end(), [&] {
    return static_cast<std::int64_t>(std::clamp(length(random), 30.0, 2000.0));
  });
  const Columns<std::int64_t> columns{{sizes, Limit(Cost::sum(), std::int64_t{8000})}};
  // Large worlds too: a chunk of samples alone would not make one step of 64.
  for (const std::int64_t world_size : {2, 8, 64}) {
    const PlanReport plan =
        report(*ordered_batching(columns, {.indices = {}, .shuffle = true}), 1, world_size);
    EXPECT_LT(plan.imbalance, 0.02) << world_size;
  }
}

TEST(PlanReport, TextSaysWhatBecameOfTheSamples) {
  const Ints sizes{4, 4, 2, 40, 2, 30};
  const auto batching =
      ordered_batching(Columns<std::int64_t>{{sizes, Limit(Cost::sum(), std::int64_t{8})}});
  EXPECT_EQ(to_string(report(*batching, 0)),
            "4 of 6 samples in 2 batches\n"
            "  fill       75.00 %\n"
            "  padding    0.00 %\n"
            "  left out   2, over budget");
  const std::string shared = to_string(report(*batching, 0, 2));
  EXPECT_NE(shared.find("in 2 batches on 2 ranks"), std::string::npos) << shared;
  EXPECT_NE(shared.find("imbalance  33.33 %"), std::string::npos) << shared;
  const std::string too_few = to_string(report(*batching, 0, 9));
  EXPECT_NE(too_few.find("0 of 6 samples in 0 batches"), std::string::npos) << too_few;
  EXPECT_NE(too_few.find("left out   4, too few for ranks"), std::string::npos) << too_few;
}

TEST(PlanReport, ReasonsHaveNames) {
  EXPECT_STREQ(to_string(LeftOutReason::over_budget), "over budget");
  EXPECT_STREQ(to_string(LeftOutReason::outside_buckets), "outside buckets");
  EXPECT_STREQ(to_string(LeftOutReason::dropped_last), "dropped last");
  EXPECT_STREQ(to_string(LeftOutReason::too_few_for_ranks), "too few for ranks");
}

}  // namespace
}  // namespace brim::batching
