#include <brim/batching/batching.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "batching/reference.h"

namespace brim::batching {
namespace {

using namespace reference;

/// One sample after the other; what does not fit by itself is left out. Sums and products are made
/// anew only where that is cheap enough.
template <class T>
Lists greedy(const Columns<T>& columns, const Ints& order, Ints& left_out) {
  Lists lists;
  Ints batch;
  std::vector<T> sums(columns.size());
  std::vector<T> longest(columns.size());
  const auto fits = [&](std::int64_t sample, bool empty) {
    for (std::size_t c = 0; c < columns.size(); ++c) {
      const T size = columns[c].sizes[static_cast<std::size_t>(sample)];
      const T most = empty ? size : std::max(size, longest[c]);
      const auto n = static_cast<T>(empty ? 1 : batch.size() + 1);
      T cost = 0;
      switch (columns[c].limit.cost().kind()) {
        case Cost::Kind::sum:
          cost = empty ? size : sums[c] + size;
          break;
        case Cost::Kind::count:
          cost = n;
          break;
        case Cost::Kind::padded:
          cost = n * most;
          break;
        default:
          cost = n * most * most;
      }
      if (static_cast<double>(cost) > columns[c].limit.real()) {
        return false;
      }
    }
    return true;
  };
  for (const std::int64_t sample : order) {
    if (!fits(sample, true)) {
      left_out.push_back(sample);
      continue;
    }
    if (!batch.empty() && !fits(sample, false)) {
      lists.push_back(std::exchange(batch, {}));
    }
    for (std::size_t c = 0; c < columns.size(); ++c) {
      const T size = columns[c].sizes[static_cast<std::size_t>(sample)];
      sums[c] = batch.empty() ? size : sums[c] + size;
      longest[c] = batch.empty() ? size : std::max(longest[c], size);
    }
    batch.push_back(sample);
  }
  if (!batch.empty()) {
    lists.push_back(batch);
  }
  return lists;
}

template <class T>
void expect_greedy(const Columns<T>& columns, const Ints& order, bool all_in_order) {
  Ints left_out;
  const Lists expected = greedy(columns, order, left_out);
  const auto batching =
      all_in_order ? ordered_batching(columns)
                   : ordered_batching(columns, {.indices = std::span(order), .shuffle = false});
  ASSERT_EQ(read(*batching), expected);
  ASSERT_EQ(indices_of(batching->left_out()), left_out);
  ASSERT_EQ(batching->samples(), std::ssize(order));
}

TEST(OrderedBatching, IsGreedyForEveryCost) {
  Random random(1);
  for (int trial = 0; trial < 300; ++trial) {
    const std::int64_t samples = any_int(random, 0, 400);
    const std::int64_t most = any_int(random, 0, 40);
    const Ints ints = random_ints(random, samples, 0, most);
    const Doubles doubles = random_quarters(random, samples, 0, most);
    const std::int64_t maximum = any_int(random, std::max<std::int64_t>(1, most - 5), 300);
    for (const Cost& cost : {Cost::sum(), Cost::count(), Cost::padded(), Cost::padded_squared()}) {
      const Limit limit(cost, maximum);
      expect_greedy(Columns<std::int64_t>{{ints, limit}}, numbers_below(samples), true);
      expect_greedy(Columns<double>{{doubles, limit}}, numbers_below(samples), true);
      ASSERT_FALSE(HasFailure());
    }
  }
}

TEST(OrderedBatching, IsGreedyForSeveralBudgets) {
  Random random(2);
  for (int trial = 0; trial < 200; ++trial) {
    const std::int64_t samples = any_int(random, 0, 3000);
    const Ints nodes = random_ints(random, samples, 0, 40);
    const Ints edges = random_ints(random, samples, 0, 300);
    const Columns<std::int64_t> columns{{nodes, Limit(Cost::sum(), any_int(random, 38, 500))},
                                        {edges, Limit(Cost::padded(), any_int(random, 290, 5000))},
                                        {nodes, Limit(Cost::count(), any_int(random, 1, 30))}};
    expect_greedy(columns, numbers_below(samples), true);
    ASSERT_FALSE(HasFailure());
  }
}

TEST(OrderedBatching, ChunksLeaveNoTrace) {
  Random random(3);
  for (const std::int64_t around : {1024, 2048, 3072, 16'384, 50'000}) {
    for (std::int64_t samples = around - 2; samples <= around + 2; ++samples) {
      const Ints sizes = random_ints(random, samples, 0, 100);
      // Tens of batches in a chunk; and batches that are larger than a chunk.
      for (const std::int64_t maximum : {150, 3000, 60'000, 400'000}) {
        expect_greedy(Columns<std::int64_t>{{sizes, Limit(Cost::sum(), maximum)}},
                      numbers_below(samples), true);
        expect_greedy(Columns<std::int64_t>{{sizes, Limit(Cost::padded(), maximum)}},
                      numbers_below(samples), true);
        ASSERT_FALSE(HasFailure()) << samples << " under " << maximum;
      }
    }
  }
}

TEST(OrderedBatching, OneBatchMayHoldEverything) {
  const Ints sizes(40'000, 0);
  const auto batching =
      ordered_batching(Columns<std::int64_t>{{sizes, Limit(Cost::sum(), std::int64_t{1})}});
  EXPECT_EQ(read(*batching), Lists{numbers_below(40'000)});
}

TEST(OrderedBatching, FollowsAListOfIndicesWithRepeats) {
  Random random(4);
  for (int trial = 0; trial < 100; ++trial) {
    const std::int64_t samples = any_int(random, 1, 200);
    const Ints sizes = random_ints(random, samples, 0, 30);
    const Ints order = random_ints(random, any_int(random, 0, 3000), 0, samples - 1);
    // Some are over the budget, and are left out as often as they stand in the list.
    expect_greedy(Columns<std::int64_t>{{sizes, Limit(Cost::sum(), std::int64_t{27})}}, order,
                  false);
    ASSERT_FALSE(HasFailure());
  }
}

TEST(OrderedBatching, ShuffledIsGreedyInAnotherOrder) {
  Random random(5);
  for (const std::int64_t samples : {10, 900, 5000}) {
    const Ints sizes = random_ints(random, samples, 0, 30);
    const Columns<std::int64_t> columns{{sizes, Limit(Cost::sum(), std::int64_t{28})}};
    const auto batching = ordered_batching(columns, {.indices = {}, .shuffle = true});
    const Lists lists = read(*batching, 9);
    Ints order;
    for (const Ints& list : lists) {
      order.insert(order.end(), list.begin(), list.end());
    }
    Ints left_out;
    EXPECT_EQ(greedy(columns, order, left_out), lists);
    EXPECT_TRUE(left_out.empty());
    EXPECT_FALSE(std::is_sorted(order.begin(), order.end()));
    const Ints over = indices_of(batching->left_out());
    order.insert(order.end(), over.begin(), over.end());
    std::sort(order.begin(), order.end());
    EXPECT_EQ(order, numbers_below(samples));
  }
}

TEST(OrderedBatching, HugeSizesDoNotOverflow) {
  const Ints sizes{kLargest, kLargest - 1, 1, kLargest, 0, 2, kLargest - 2};
  const auto sum = ordered_batching(Columns<std::int64_t>{{sizes, Limit(Cost::sum(), kLargest)}});
  EXPECT_EQ(read(*sum), (Lists{{0}, {1, 2}, {3, 4}, {5, 6}}));
  const auto padded =
      ordered_batching(Columns<std::int64_t>{{sizes, Limit(Cost::padded(), kLargest)}});
  EXPECT_EQ(read(*padded), (Lists{{0}, {1}, {2}, {3}, {4, 5}, {6}}));
}

TEST(OrderedBatching, OversizeIsLeftOutOrAnError) {
  const Ints sizes{1, 50, 3, 11, 2};
  const Columns<std::int64_t> columns{{sizes, Limit(Cost::sum(), std::int64_t{10})}};
  const auto batching = ordered_batching(columns);
  EXPECT_EQ(batching->left_out(), (std::vector<LeftOut>{{1, LeftOutReason::over_budget},
                                                        {3, LeftOutReason::over_budget}}));
  EXPECT_EQ(read(*batching), (Lists{{0, 2, 4}}));
  expect_message([&] { (void)ordered_batching(columns, {}, Oversize::error); },
                 {"sample 1", "50", "max_total_size is 10"});
  // Not asked for, so not in the way.
  const Ints order{0, 4, 2};
  EXPECT_EQ(read(*ordered_batching(columns, {.indices = std::span(order), .shuffle = false},
                                   Oversize::error)),
            (Lists{{0, 4, 2}}));
}

TEST(OrderedBatching, BudgetBelowOneHoldsOnlyEmptySamplesOfWholeSize) {
  const Ints sizes{0, 1, 0};
  const auto batching = ordered_batching(Columns<std::int64_t>{{sizes, Limit(Cost::sum(), 0.5)}});
  EXPECT_EQ(read(*batching), (Lists{{0, 2}}));
  EXPECT_EQ(indices_of(batching->left_out()), (Ints{1}));
}

TEST(OrderedBatching, CustomCostDecidesByCountAndLongest) {
  Random random(6);
  const Ints sizes = random_ints(random, 5000, 1, 100);
  const auto price = [](std::int64_t count, double longest) {
    return 50.0 + static_cast<double>(count) * (longest + 0.01 * longest * longest);
  };
  const Cost cost = Cost::custom(
      [price](double longest, double budget) {
        std::int64_t count = 0;
        while (price(count + 1, longest) <= budget) {
          ++count;
        }
        return count;
      },
      price);
  const Columns<std::int64_t> columns{{sizes, Limit(cost, 600.0)}};
  const auto batching = ordered_batching(columns);
  const Lists lists = read(*batching);
  double longest_before = 0.0;
  for (std::size_t b = 0; b < lists.size(); ++b) {
    double longest = 0.0;
    for (const std::int64_t sample : lists[b]) {
      longest = std::max(longest, static_cast<double>(sizes[static_cast<std::size_t>(sample)]));
    }
    const double load = price(std::ssize(lists[b]), longest) / 600;
    EXPECT_LE(load, 1.0);
    EXPECT_DOUBLE_EQ(batching->figures(lists[b]).load, load);
    if (b > 0) {
      const auto next = static_cast<double>(sizes[static_cast<std::size_t>(lists[b][0])]);
      EXPECT_GT(price(std::ssize(lists[b - 1]) + 1, std::max(longest_before, next)), 600.0);
    }
    longest_before = longest;
  }
  EXPECT_EQ(sorted_indices(lists), numbers_below(5000));
}

TEST(OrderedBatching, LoadsAreSharesOfTheBudget) {
  Random random(7);
  const Ints sizes = random_ints(random, 2000, 1, 100);
  const auto batching =
      ordered_batching(Columns<std::int64_t>{{sizes, Limit(Cost::padded(), std::int64_t{400})}});
  Batches batches;
  BatchStream(*batching, 0).read_rest(batches);
  for (std::size_t b = 0; b < batches.count(); ++b) {
    Ints of_batch;
    for (const std::int64_t sample : batches[b]) {
      of_batch.push_back(sizes[static_cast<std::size_t>(sample)]);
    }
    const auto cost = static_cast<double>(cost_of(Cost::Kind::padded, of_batch));
    EXPECT_DOUBLE_EQ(batches.loads[b], cost / 400);
    EXPECT_DOUBLE_EQ(batching->figures(batches[b]).load, cost / 400);
  }
}

TEST(OrderedBatching, NoSamplesGiveNoBatches) {
  const Ints none;
  for (const bool shuffle : {false, true}) {
    const auto batching =
        ordered_batching(Columns<std::int64_t>{{none, Limit(Cost::sum(), std::int64_t{1})}},
                         {.indices = {}, .shuffle = shuffle});
    EXPECT_TRUE(read(*batching).empty());
    EXPECT_EQ(batching->samples(), 0);
  }
  const Ints sizes{1, 2};
  const auto batching =
      ordered_batching(Columns<std::int64_t>{{sizes, Limit(Cost::sum(), std::int64_t{1})}},
                       {.indices = std::span(none), .shuffle = false});
  EXPECT_TRUE(read(*batching).empty());
}

TEST(OrderedBatching, WrongSizeIsAnErrorThatNamesItsIndex) {
  const Limit limit(Cost::sum(), std::int64_t{10});
  const auto make = [&](const auto& sizes) {
    using T = typename std::decay_t<decltype(sizes)>::value_type;
    (void)ordered_batching(Columns<T>{{sizes, limit}});
  };
  expect_message([&] { make(Ints{1, 2, -3, 4}); }, {"not negative", "-3", "index 2"});
  expect_message([&] { make(Doubles{1, std::nan(""), 2}); }, {"finite", "nan", "index 1"});
  expect_message([&] { make(Doubles{1, 2, HUGE_VAL}); }, {"finite", "inf", "index 2"});
  expect_message([&] { make(Doubles{-1.5}); }, {"not negative", "-1.5", "index 0"});
  const Ints three{1, 2, 3};
  const Ints two{1, 2};
  expect_message(
      [&] { (void)ordered_batching(Columns<std::int64_t>{{three, limit}, {two, limit}}); },
      {"equally long", "3", "2"});
  expect_message([] { (void)ordered_batching(Columns<std::int64_t>{}); }, {"at least one column"});
}

TEST(OrderedBatching, IndexThatDoesNotExistIsAnErrorThatNamesIt) {
  const Ints sizes{1, 2, 3};
  const Columns<std::int64_t> columns{{sizes, Limit(Cost::sum(), std::int64_t{10})}};
  for (const std::int64_t wrong : {3, -1}) {
    const Ints order{0, 2, wrong};
    expect_message(
        [&] { (void)ordered_batching(columns, {.indices = std::span(order), .shuffle = false}); },
        {"indices", "from 0 to 2", "got " + std::to_string(wrong), "place 2"});
  }
}

}  // namespace
}  // namespace brim::batching
