#include <brim/batching/stream.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "batching/reference.h"
#include "batching/stream_cases.h"

namespace brim::batching {
namespace {

using namespace reference;

constexpr std::int64_t kWorldSizes[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 16};

void expect_shared_out(const Case& some, std::int64_t world_size) {
  SCOPED_TRACE(some.name + " on " + std::to_string(world_size) + " ranks");
  std::vector<BatchStream> streams = start(*some.batching, 5, world_size);
  const JobRun run = read(streams);
  expect_equal_counts(run);
  const Lists all = run.all();
  expect_all_once(some, all, run.left_out);
  expect_fitting(some, all);
  std::size_t too_few = 0;
  for (const LeftOut& sample : run.left_out) {
    too_few += static_cast<std::size_t>(sample.reason == LeftOutReason::too_few_for_ranks);
  }
  EXPECT_LT(too_few, static_cast<std::size_t>(world_size)) << "less than one sample a rank";
}

TEST(BatchStream, RanksShareAllSamplesEquallyForAnyWorldSize) {
  Random random(1);
  for (int trial = 0; trial < 400; ++trial) {
    const auto some = random_case(random, 300);
    for (const std::int64_t world_size : kWorldSizes) {
      expect_shared_out(*some, world_size);
      ASSERT_FALSE(HasFailure());
    }
  }
}

TEST(BatchStream, RanksShareAllSamplesEquallyOverManyBlocks) {
  Random random(2);
  for (int trial = 0; trial < 80; ++trial) {
    const auto some = random_case(random, 9000);
    expect_shared_out(*some, kWorldSizes[static_cast<std::size_t>(any_int(random, 0, 9))]);
    ASSERT_FALSE(HasFailure());
  }
}

TEST(BatchStream, RanksShareBatchesThatAreFewInABlock) {
  const Ints sizes(60'000, 1);
  Case some;
  some.name = "large batches";
  some.columns = Columns<std::int64_t>{{sizes, Limit(Cost::sum(), std::int64_t{700})}};
  some.batching = ordered_batching(some.columns);
  for (const std::int64_t world_size : {2, 7, 16, 50, 85, 86, 87}) {
    expect_shared_out(some, world_size);
  }
}

TEST(BatchStream, FewerSamplesThanRanksAreAllReported) {
  const Ints sizes{3, 4, 5};
  const auto batching =
      ordered_batching(Columns<std::int64_t>{{sizes, Limit(Cost::sum(), std::int64_t{100})}});
  for (std::int64_t rank = 0; rank < 4; ++rank) {
    BatchStream stream(*batching, 0, {.rank = rank, .world_size = 4});
    EXPECT_FALSE(stream.next().has_value());
    ASSERT_EQ(stream.left_out().size(), 3U);
    std::set<std::int64_t> indices;
    for (const LeftOut& sample : stream.left_out()) {
      EXPECT_EQ(sample.reason, LeftOutReason::too_few_for_ranks);
      indices.insert(sample.index);
    }
    EXPECT_EQ(indices, (std::set<std::int64_t>{0, 1, 2}));
  }
  EXPECT_EQ(read(*batching, 0, {.rank = 2, .world_size = 3}).size(), 1U);
}

TEST(BatchStream, SingletonsThatDoNotDivideLeaveLessThanOneEach) {
  const Ints sizes(1003, 9);
  const auto batching =
      ordered_batching(Columns<std::int64_t>{{sizes, Limit(Cost::sum(), std::int64_t{10})}});
  std::vector<BatchStream> streams = start(*batching, 0, 16);
  const JobRun run = read(streams);
  for (const Lists& rank : run.ranks) {
    EXPECT_EQ(rank.size(), 1003U / 16);
  }
  EXPECT_EQ(run.left_out.size(), 1003U % 16);
}

TEST(BatchStream, LastWindowThatCouldNotCompleteAStepIsTakenBefore) {
  // Four windows of 20 are four steps and 4 batches over; the last 10 samples could not complete
  // the fifth.
  const Ints sizes(90, 10);
  Case some;
  some.columns = Columns<std::int64_t>{{sizes, Limit(Cost::sum(), std::int64_t{10})}};
  some.batching =
      packed_batching(some.columns, {}, {.window = 20, .oversize = Oversize::leave_out});
  for (std::int64_t world_size = 2; world_size < 60; ++world_size) {
    expect_shared_out(some, world_size);
  }
}

TEST(BatchStream, OnlyAsManyBatchesAreSplitAsAreMissing) {
  // 10 batches of 4: on 4 ranks two more are needed.
  const Ints sizes(40, 1);
  const auto batching =
      ordered_batching(Columns<std::int64_t>{{sizes, Limit(Cost::sum(), std::int64_t{4})}});
  std::vector<BatchStream> streams = start(*batching, 0, 4);
  const JobRun run = read(streams);
  std::multiset<std::size_t> counts;
  for (const Ints& batch : run.all()) {
    counts.insert(batch.size());
  }
  EXPECT_EQ(counts.count(4), 8U);
  EXPECT_EQ(counts.count(2), 4U);
  EXPECT_EQ(counts.size(), 12U);
  EXPECT_TRUE(run.left_out.empty());
}

TEST(BatchStream, SameSeedGivesTheSameAndAnotherSeedAnotherOrder) {
  Random random(3);
  const Ints sizes = random_ints(random, 3000, 1, 50);
  const AnyColumns columns = Columns<std::int64_t>{{sizes, Limit(Cost::sum(), std::int64_t{200})}};
  BucketOptions options;
  options.boundaries = {0, 20, 51};
  const std::shared_ptr<const Batching> ways[] = {
      ordered_batching(columns, {.indices = {}, .shuffle = true}),
      packed_batching(columns, {.indices = {}, .shuffle = true}),
      bucket_batching(std::span<const std::int64_t>(sizes), columns, options)};
  for (const auto& batching : ways) {
    const Ranks ranks{.rank = 1, .world_size = 3};
    EXPECT_EQ(read(*batching, 8, ranks), read(*batching, 8, ranks));
    EXPECT_NE(read(*batching, 8, ranks), read(*batching, 9, ranks));
  }
}

TEST(BatchStream, SeedsOfEpochsDiffer) {
  std::set<std::uint64_t> seeds;
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    for (std::uint64_t epoch = 0; epoch < 30; ++epoch) {
      seeds.insert(epoch_seed(seed, epoch));
    }
  }
  EXPECT_EQ(seeds.size(), 900U);
}

TEST(BatchStream, StreamsInTurnsDoNotDisturbEachOther) {
  Random random(4);
  for (int trial = 0; trial < 40; ++trial) {
    const auto some = random_case(random, 4000);
    SCOPED_TRACE(some->name);
    const Lists expected = read(*some->batching, 1);
    const Lists expected_other = read(*some->batching, 2, {.rank = 0, .world_size = 2});
    BatchStream stream(*some->batching, 1);
    BatchStream other(*some->batching, 2, {.rank = 0, .world_size = 2});
    Lists lists;
    Lists other_lists;
    for (bool going = true; going;) {
      going = false;
      if (const auto batch = stream.next()) {
        lists.emplace_back(batch->begin(), batch->end());
        going = true;
      }
      if (const auto batch = other.next()) {
        other_lists.emplace_back(batch->begin(), batch->end());
        going = true;
      }
    }
    EXPECT_EQ(lists, expected);
    EXPECT_EQ(other_lists, expected_other);
  }
}

TEST(BatchStream, CountAndReadOfTheRestAgreeWithNext) {
  Random random(5);
  for (int trial = 0; trial < 150; ++trial) {
    const auto some = random_case(random, trial % 2 == 0 ? 200 : 5000);
    SCOPED_TRACE(some->name);
    const std::int64_t world_size = any_int(random, 1, 9);
    const Ranks ranks{any_int(random, 0, world_size - 1), world_size};
    const Lists expected = read(*some->batching, 6, ranks);
    const auto begin = static_cast<std::size_t>(any_int(random, 0, std::ssize(expected)));
    BatchStream counted(*some->batching, 6, ranks);
    BatchStream copied(*some->batching, 6, ranks);
    for (std::size_t i = 0; i < begin; ++i) {
      ASSERT_TRUE(counted.next() && copied.next());
    }
    EXPECT_EQ(copied.given(), static_cast<std::int64_t>(begin));
    EXPECT_EQ(counted.count_rest(), static_cast<std::int64_t>(expected.size() - begin));
    EXPECT_FALSE(counted.next().has_value());
    Batches batches;
    copied.read_rest(batches);
    EXPECT_EQ(lists_of(batches),
              Lists(expected.begin() + static_cast<std::ptrdiff_t>(begin), expected.end()));
    EXPECT_EQ(batches.loads.size(), batches.count());
    EXPECT_FALSE(copied.next().has_value());
    EXPECT_EQ(copied.left_out(), counted.left_out());
  }
}

TEST(BatchStream, ReadOfAllRanksIsTheRanksInTurns) {
  Random random(6);
  for (int trial = 0; trial < 100; ++trial) {
    const auto some = random_case(random, trial % 2 == 0 ? 200 : 5000);
    SCOPED_TRACE(some->name);
    const std::int64_t world_size = any_int(random, 1, 9);
    std::vector<BatchStream> streams = start(*some->batching, 7, world_size);
    const JobRun run = read(streams);
    Lists expected;
    for (std::size_t step = 0; step < run.ranks[0].size(); ++step) {
      for (const Lists& rank : run.ranks) {
        expected.push_back(rank[step]);
      }
    }
    BatchStream first(*some->batching, 7, {.rank = 0, .world_size = world_size});
    const bool one_step = first.next().has_value() && trial % 3 == 0;
    if (!one_step) {
      BatchStream again(*some->batching, 7, {.rank = 0, .world_size = world_size});
      Batches batches;
      again.read_rest(batches, /*all_ranks=*/true);
      EXPECT_EQ(lists_of(batches), expected);
      EXPECT_EQ(again.left_out(), run.left_out);
    } else {
      Batches batches;
      first.read_rest(batches, /*all_ranks=*/true);
      EXPECT_EQ(lists_of(batches), Lists(expected.begin() + world_size, expected.end()));
    }
  }
}

TEST(BatchStream, ReadAppendsAndReportsOnlyItsOwn) {
  const Ints sizes{1, 1, 1, 2, 2};
  BucketOptions options;
  options.boundaries = {0, 2, 3};
  options.batch_sizes = {2, 2};
  options.drop_last = true;
  const auto batching =
      bucket_batching(std::span<const std::int64_t>(sizes), Columns<std::int64_t>{}, options);
  Batches batches;
  for (std::uint64_t epoch = 0; epoch < 2; ++epoch) {
    BatchStream stream(*batching, epoch);
    stream.read_rest(batches);
    EXPECT_EQ(stream.left_out().size(), 1U);
    EXPECT_EQ(batches.count(), 2 * (epoch + 1));
  }
}

TEST(BatchStream, BlockHoldsTheBatchThatWasGiven) {
  Random random(7);
  const Ints sizes = random_ints(random, 20'000, 1, 50);
  const auto batching =
      ordered_batching(Columns<std::int64_t>{{sizes, Limit(Cost::sum(), std::int64_t{100})}});
  BatchStream stream(*batching, 0, {.rank = 1, .world_size = 3});
  std::int64_t blocks = 0;
  for (bool at_end = stream.at_block_end(); const auto batch = stream.next();
       at_end = stream.at_block_end()) {
    blocks += static_cast<std::int64_t>(at_end);
    EXPECT_EQ(stream.blocks_opened(), blocks);
    const std::vector<std::int64_t>& indices = stream.block().indices;
    EXPECT_GE(batch->data(), indices.data());
    EXPECT_LE(batch->data() + batch->size(), indices.data() + indices.size());
  }
  EXPECT_GT(blocks, 2);
}

TEST(BatchStream, WrongRanksAreAnErrorThatNamesThem) {
  const Ints sizes{1};
  const auto batching =
      ordered_batching(Columns<std::int64_t>{{sizes, Limit(Cost::sum(), std::int64_t{100})}});
  const auto make = [&](Ranks ranks) { BatchStream(*batching, 0, ranks); };
  expect_message([&] { make({.rank = 0, .world_size = 0}); }, {"world_size", "at least 1", "0"});
  expect_message([&] { make({.rank = 0, .world_size = -3}); }, {"world_size", "-3"});
  expect_message([&] { make({.rank = 4, .world_size = 4}); }, {"rank", "3", "got 4"});
  expect_message([&] { make({.rank = -1, .world_size = 4}); }, {"rank", "got -1"});
}

}  // namespace
}  // namespace brim::batching
