#include "batching/balance_ranks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "batching/reference.h"

namespace brim::batching::detail {
namespace {

using namespace reference;

Batches block_of(const Lists& lists, const Doubles& loads) {
  Batches block;
  for (std::size_t b = 0; b < lists.size(); ++b) {
    block.indices.insert(block.indices.end(), lists[b].begin(), lists[b].end());
    block.close(loads[b]);
  }
  return block;
}

/// Batches of `samples` samples each, numbered on; loads are random.
Batches random_block(Random& random, std::int64_t batches, std::int64_t most_samples) {
  Lists lists;
  Doubles loads;
  std::int64_t next = 0;
  for (std::int64_t b = 0; b < batches; ++b) {
    Ints& list = lists.emplace_back();
    for (std::int64_t samples = any_int(random, 1, most_samples); samples > 0; --samples) {
      list.push_back(next++);
    }
    loads.push_back(static_cast<double>(any_int(random, 1, 1000)) / 1000);
  }
  return block_of(lists, loads);
}

void expect_consistent(const Batches& block) {
  ASSERT_EQ(block.loads.size(), block.count());
  ASSERT_EQ(block.offsets.front(), 0);
  ASSERT_EQ(block.offsets.back(), std::ssize(block.indices));
}

TEST(BalanceRanks, OneRankChangesNothing) {
  Random random(1);
  const Batches before = random_block(random, 20, 5);
  Batches block = before;
  std::vector<LeftOut> left_out;
  balance_ranks(block, 1, 0, true, left_out);
  EXPECT_EQ(lists_of(block), lists_of(before));
  EXPECT_EQ(block.loads, before.loads);
  EXPECT_TRUE(left_out.empty());
}

TEST(BalanceRanks, StepsAreRunsOfTheSortedLoads) {
  Random random(2);
  for (std::int64_t world_size = 2; world_size < 10; ++world_size) {
    Batches block = random_block(random, 12 * world_size, 5);
    Doubles sorted = block.loads;
    std::sort(sorted.rbegin(), sorted.rend());
    std::multiset<Doubles> expected;
    for (auto at = sorted.begin(); at != sorted.end(); at += world_size) {
      expected.emplace(at, at + world_size);
    }
    std::vector<LeftOut> left_out;
    balance_ranks(block, world_size, 0, false, left_out);
    std::multiset<Doubles> steps;
    for (auto at = block.loads.begin(); at != block.loads.end(); at += world_size) {
      steps.emplace(at, at + world_size);
    }
    EXPECT_EQ(steps, expected);
  }
}

TEST(BalanceRanks, StepsKeepTheOrderOfTheirFirstBatches) {
  Random random(3);
  Batches block = random_block(random, 40, 1);  // batch b is sample b
  std::vector<LeftOut> left_out;
  balance_ranks(block, 4, 0, false, left_out);
  std::int64_t before = -1;
  for (std::size_t step = 0; step < 10; ++step) {
    std::int64_t first = 40;
    for (std::size_t i = 0; i < 4; ++i) {
      first = std::min(first, block[4 * step + i][0]);
    }
    EXPECT_GT(first, before);
    before = first;
  }
}

TEST(BalanceRanks, KeepsEveryBatchWholeInTheMiddleOfAnEpoch) {
  Random random(4);
  for (int trial = 0; trial < 300; ++trial) {
    const std::int64_t world_size = any_int(random, 2, 9);
    const Batches before = random_block(random, any_int(random, 0, 40), 5);
    Batches block = before;
    std::vector<LeftOut> left_out;
    balance_ranks(block, world_size, any_int(random, 0, world_size - 1), false, left_out);
    expect_consistent(block);
    std::multiset<std::pair<Ints, double>> expected;
    std::multiset<std::pair<Ints, double>> arranged;
    const Lists lists_before = lists_of(before);
    const Lists lists = lists_of(block);
    ASSERT_EQ(lists.size(), lists_before.size());
    for (std::size_t b = 0; b < lists.size(); ++b) {
      expected.emplace(lists_before[b], before.loads[b]);
      arranged.emplace(lists[b], block.loads[b]);
    }
    ASSERT_EQ(arranged, expected);
    ASSERT_TRUE(left_out.empty());
  }
}

TEST(BalanceRanks, SharedStepsAreOfMiddlingCost) {
  // 3 batches complete the step of the block before, 2 begin one for the block after.
  Random random(5);
  Batches block = random_block(random, 3 + 40 + 2, 1);
  Doubles sorted = block.loads;
  std::sort(sorted.begin(), sorted.end());
  std::vector<LeftOut> left_out;
  balance_ranks(block, 4, 1, false, left_out);
  const auto middling = [&](double load) { return load >= sorted[15] && load <= sorted[29]; };
  EXPECT_TRUE(std::all_of(block.loads.begin(), block.loads.begin() + 3, middling));
  EXPECT_TRUE(std::all_of(block.loads.end() - 2, block.loads.end(), middling));
}

TEST(BalanceRanks, LastBlockIsMadeCompleteBySplitting) {
  Random random(6);
  for (int trial = 0; trial < 500; ++trial) {
    const std::int64_t world_size = any_int(random, 2, 9);
    const std::int64_t step_offset = any_int(random, 0, world_size - 1);
    const Batches before = random_block(random, any_int(random, 0, 25), any_int(random, 1, 6));
    const std::int64_t samples = std::ssize(before.indices);
    const auto batches = static_cast<std::int64_t>(before.count());
    Batches block = before;
    std::vector<LeftOut> left_out;
    balance_ranks(block, world_size, step_offset, true, left_out);
    expect_consistent(block);
    if (samples < world_size - step_offset) {
      continue;  // the stream sees to it that there are enough
    }
    const auto count = static_cast<std::int64_t>(block.count());
    ASSERT_EQ((step_offset + count) % world_size, 0);
    Lists lists = lists_of(block);
    // Each batch is a part of one that was there.
    for (const Ints& list : lists) {
      ASSERT_FALSE(list.empty());
      const auto from = std::upper_bound(before.offsets.begin(), before.offsets.end(),
                                         *std::min_element(list.begin(), list.end()));
      ASSERT_LT(*std::max_element(list.begin(), list.end()), *from);
    }
    lists.push_back(indices_of(left_out));
    ASSERT_EQ(sorted_indices(lists), numbers_below(samples));
    // Split only as far as needed, left out only where there is nothing to split.
    const std::int64_t missing = (world_size - (step_offset + batches) % world_size) % world_size;
    if (samples - batches >= missing) {
      ASSERT_EQ(count, batches + missing);
      ASSERT_TRUE(left_out.empty());
    } else {
      ASSERT_EQ(count, samples - (step_offset + samples) % world_size);
      ASSERT_LT(std::ssize(left_out), world_size);
    }
  }
}

TEST(BalanceRanks, SplitsTheEmptiestAndSpreadsTheirSamples) {
  Batches block = block_of({{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}}, {1.0, 0.5, 0.9});
  std::vector<LeftOut> left_out;
  balance_ranks(block, 4, 0, true, left_out);
  std::multiset<Ints> lists;
  for (const Ints& list : lists_of(block)) {
    lists.insert(list);
  }
  // Three batches are an incomplete step; of the three the costliest is halved, every other sample
  // to each half.
  EXPECT_EQ(lists, (std::multiset<Ints>{{0, 2}, {1, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}}));
  Doubles loads = block.loads;
  std::sort(loads.begin(), loads.end());
  EXPECT_EQ(loads, (Doubles{0.5, 0.5, 0.5, 0.9}));
}

TEST(BalanceRanks, FullStepsAreNotSplit) {
  Batches block = block_of({{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}}, {1.0, 0.9, 0.8, 0.7, 0.2});
  std::vector<LeftOut> left_out;
  balance_ranks(block, 2, 0, true, left_out);
  std::multiset<Ints> lists;
  for (const Ints& list : lists_of(block)) {
    lists.insert(list);
  }
  EXPECT_EQ(lists, (std::multiset<Ints>{{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8}, {9}}));
}

TEST(DropFront, LeavesTheRestAsItWas) {
  Random random(7);
  const Batches before = random_block(random, 10, 4);
  const Lists lists = lists_of(before);
  for (std::size_t count = 0; count <= 10; ++count) {
    Batches block = before;
    drop_front(block, count);
    expect_consistent(block);
    const auto from = static_cast<std::ptrdiff_t>(count);
    EXPECT_EQ(lists_of(block), Lists(lists.begin() + from, lists.end()));
    EXPECT_EQ(block.loads, Doubles(before.loads.begin() + from, before.loads.end()));
  }
}

}  // namespace
}  // namespace brim::batching::detail
