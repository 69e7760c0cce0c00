// The model of torch's allocator: each rule by hand, properties, and random sequences against a
// slow allocator that keeps plain lists. Recorded histories of torch's own are replayed in
// tests/python/test_allocator_model.py.

#include <brim/predict/allocator_model.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "predict/slow_allocator.h"
#include "tensors.h"

namespace brim {
namespace {

using tests::kMiB;
constexpr std::int64_t kUnlimited = AllocatorOptions::kUnlimited;

std::int64_t block_of(std::int64_t bytes, const AllocatorOptions& options = {}) {
  AllocatorModel model(options);
  return model.block(*model.allocate(bytes)).size;
}

std::int64_t reserved_for(std::int64_t bytes, const AllocatorOptions& options = {}) {
  AllocatorModel model(options);
  model.allocate(bytes);
  return model.now().reserved;
}

/// The address of an allocation, found by its requested size.
std::int64_t address_of(const AllocatorModel& model, std::int64_t requested) {
  for (const AllocatorSegment& segment : model.segments()) {
    for (const AllocatorBlock& block : segment.blocks) {
      if (block.allocated && block.requested == requested) {
        return block.address;
      }
    }
  }
  ADD_FAILURE() << "nothing of " << requested << " bytes is held";
  return -1;
}

// ------------------------------------------------------------------ the rules, one by one

TEST(AllocatorModel, RoundsBlocksTo512Bytes) {
  EXPECT_EQ(block_of(1), 512);
  EXPECT_EQ(block_of(512), 512);
  EXPECT_EQ(block_of(513), 1024);
  EXPECT_EQ(block_of(3 * kMiB + 1), 3 * kMiB + 512);
}

TEST(AllocatorModel, RoundsUpToDivisionsOfPowersOfTwo) {
  const AllocatorOptions four{.roundup_power2_divisions = 4};
  EXPECT_EQ(block_of(2048, four), 2048);  // up to 512 × 4 as without
  EXPECT_EQ(block_of(2049, four), 2560);  // 2048, 2560, 3072, 3584, 4096
  EXPECT_EQ(block_of(4000, four), 4096);
  EXPECT_EQ(block_of(5 * kMiB + 1, four), 6 * kMiB);  // 4, 5, 6, 7, 8 MiB
  EXPECT_EQ(block_of(1200, {.roundup_power2_divisions = 2}), 1536);
}

TEST(AllocatorModel, TakesSegmentsByTheSizeOfTheRequest) {
  EXPECT_EQ(reserved_for(1), 2 * kMiB);
  EXPECT_EQ(reserved_for(kMiB), 2 * kMiB);
  EXPECT_EQ(reserved_for(kMiB + 1), 20 * kMiB);
  EXPECT_EQ(reserved_for(10 * kMiB - 1), 10 * kMiB);  // rounded to 10 MiB, which is its own
  EXPECT_EQ(reserved_for(10 * kMiB - 512), 20 * kMiB);
  EXPECT_EQ(reserved_for(10 * kMiB), 10 * kMiB);
  EXPECT_EQ(reserved_for(10 * kMiB + 1), 12 * kMiB);
  EXPECT_EQ(reserved_for(5 * kMiB, {.large_segment_size = 32 * kMiB}), 32 * kMiB);
}

TEST(AllocatorModel, NothingTakesNothing) {
  AllocatorModel model;
  const auto none = model.allocate(0);
  ASSERT_TRUE(none.has_value());
  EXPECT_EQ(model.block(*none).size, 0);
  EXPECT_EQ(model.now(), AllocatorUse{});
  model.free(*none);
  EXPECT_THROW(model.free(*none), std::invalid_argument);
}

TEST(AllocatorModel, SmallBlocksAreSplitDownTo512Bytes) {
  AllocatorModel model;
  model.allocate(kMiB);
  model.allocate(kMiB - 512);
  model.allocate(512);  // what is left of the segment
  EXPECT_EQ(model.now().reserved, 2 * kMiB);
  EXPECT_EQ(model.now().inactive_split, 0);
  model.allocate(1);
  EXPECT_EQ(model.now().reserved, 4 * kMiB);
}

TEST(AllocatorModel, LargeBlocksAreSplitIfMoreThanOneMiBIsLeft) {
  AllocatorModel model;
  const auto first = model.allocate(9 * kMiB);
  const auto second = model.allocate(10 * kMiB);  // leaves 1 MiB: not split
  EXPECT_EQ(model.block(*first).size, 9 * kMiB);
  EXPECT_EQ(model.block(*second).size, 11 * kMiB);
  EXPECT_EQ(model.now(), (AllocatorUse{19 * kMiB, 20 * kMiB, 20 * kMiB, 0}));
  model.free(*second);
  const auto third = model.allocate(10 * kMiB - 512);  // leaves 1 MiB and 512
  EXPECT_EQ(model.block(*third).size, 10 * kMiB - 512);
  EXPECT_EQ(model.now().inactive_split, kMiB + 512);
}

TEST(AllocatorModel, TakesTheSmallestBlockThatIsLargeEnough) {
  AllocatorModel model;
  const auto large = model.allocate(40 * kMiB);
  const auto small = model.allocate(30 * kMiB);
  model.free(*large);
  model.free(*small);
  model.allocate(25 * kMiB);
  EXPECT_EQ(address_of(model, 25 * kMiB), 40 * kMiB);  // in the segment of 30 MiB
  EXPECT_EQ(model.now().reserved, 70 * kMiB);
}

TEST(AllocatorModel, OfEqualBlocksTakesTheLowestAddress) {
  AllocatorModel model;
  const auto first = model.allocate(30 * kMiB);
  const auto second = model.allocate(30 * kMiB);
  model.free(*second);
  model.free(*first);
  model.allocate(30 * kMiB - 512);
  EXPECT_EQ(address_of(model, 30 * kMiB - 512), 0);
}

TEST(AllocatorModel, PoolsShareNothing) {
  AllocatorModel model;
  model.free(*model.allocate(5 * kMiB));
  model.allocate(1000);
  EXPECT_EQ(model.now().reserved, 22 * kMiB);
}

TEST(AllocatorModel, StreamsShareNothing) {
  AllocatorModel model;
  model.free(*model.allocate(12 * kMiB, 1));
  model.allocate(12 * kMiB, 2);
  EXPECT_EQ(model.now().reserved, 24 * kMiB);
  model.allocate(12 * kMiB, 1);
  EXPECT_EQ(model.now().reserved, 24 * kMiB);
}

TEST(AllocatorModel, FreeNeighboursBecomeOneBlock) {
  AllocatorModel model;
  const auto a = model.allocate(4 * kMiB);
  const auto b = model.allocate(4 * kMiB);
  const auto c = model.allocate(4 * kMiB);
  model.free(*a);
  model.free(*c);  // with the rest of the segment
  EXPECT_EQ(model.now().inactive_split, 16 * kMiB);
  EXPECT_EQ(model.segments().at(0).blocks.size(), 3U);
  model.free(*b);
  EXPECT_EQ(model.now().inactive_split, 0);
  EXPECT_EQ(model.segments().at(0).blocks.size(), 1U);
  model.allocate(20 * kMiB);
  EXPECT_EQ(model.now().reserved, 20 * kMiB);
}

TEST(AllocatorModel, EmptyingTheCacheKeepsSegmentsInUse) {
  AllocatorModel model;
  const auto kept = model.allocate(2 * kMiB);
  model.free(*model.allocate(3 * kMiB));   // the same segment
  model.free(*model.allocate(50 * kMiB));  // one of its own
  model.free(*model.allocate(100));
  EXPECT_EQ(model.now().reserved, 72 * kMiB);
  model.empty_cache();
  EXPECT_EQ(model.now().reserved, 20 * kMiB);
  model.free(*kept);
  model.empty_cache();
  EXPECT_EQ(model.now(), AllocatorUse{});
  EXPECT_EQ(model.peak().reserved, 72 * kMiB);
}

TEST(AllocatorModel, ReleasesTheCacheBeforeItExceedsTheCapacity) {
  AllocatorModel model({.capacity = 50 * kMiB});
  model.free(*model.allocate(30 * kMiB));
  model.free(*model.allocate(1));
  ASSERT_TRUE(model.allocate(40 * kMiB).has_value());
  EXPECT_EQ(model.now().reserved, 40 * kMiB);
  EXPECT_EQ(model.retries(), 1);
  ASSERT_TRUE(model.allocate(10 * kMiB).has_value());  // to the last byte
  EXPECT_EQ(model.retries(), 1);
  EXPECT_FALSE(model.allocate(1).has_value());
  EXPECT_EQ(model.retries(), 2);
  EXPECT_EQ(model.now().reserved, 50 * kMiB);
}

TEST(AllocatorModel, UnderABudgetPiecesDoNotCount) {
  AllocatorModel model({.capacity = 30 * kMiB, .beyond = 15 * kMiB});
  model.allocate(2 * kMiB);
  model.free(*model.allocate(9 * kMiB));
  ASSERT_TRUE(model.allocate(19 * kMiB).has_value());  // 18 MiB are free beside the first one
  EXPECT_EQ(model.now().allocated, 21 * kMiB + kMiB);  // a rest of 1 MiB is not split off
  EXPECT_EQ(model.now().reserved, 40 * kMiB);
  EXPECT_FALSE(model.allocate(9 * kMiB).has_value());  // more than the capacity
  EXPECT_TRUE(model.allocate(8 * kMiB).has_value());
  AllocatorModel tight({.capacity = 30 * kMiB, .beyond = 5 * kMiB});
  tight.allocate(2 * kMiB);
  EXPECT_FALSE(tight.allocate(19 * kMiB).has_value());  // the device itself is full
}

TEST(AllocatorModel, ASplitSegmentCannotBeReleased) {
  AllocatorModel model({.capacity = 30 * kMiB});
  model.allocate(2 * kMiB);
  model.free(*model.allocate(9 * kMiB));
  EXPECT_EQ(model.now().inactive_split, 18 * kMiB);
  EXPECT_FALSE(model.allocate(19 * kMiB).has_value());  // though 28 MiB are not in use
}

TEST(AllocatorModel, BlocksAboveMaxSplitSizeStayWholeAndAreForLargeRequests) {
  AllocatorModel model({.max_split_size = 40 * kMiB});
  model.free(*model.allocate(100 * kMiB));
  model.allocate(30 * kMiB);  // not out of the 100 MiB
  EXPECT_EQ(model.now().reserved, 130 * kMiB);
  model.allocate(80 * kMiB);  // 20 MiB less: too wasteful
  EXPECT_EQ(model.now().reserved, 210 * kMiB);
  const auto near = model.allocate(80 * kMiB + 512);
  EXPECT_EQ(model.block(*near).size, 100 * kMiB);
  EXPECT_EQ(model.now().reserved, 210 * kMiB);
}

TEST(AllocatorModel, OversizedBlocksAreReleasedFirstAndNoMoreThanNeeded) {
  AllocatorModel model({.capacity = 300 * kMiB, .max_split_size = 40 * kMiB});
  std::vector<std::int64_t> held;
  for (const int size : {50, 70, 90, 30}) {
    held.push_back(*model.allocate(size * kMiB));
  }
  for (const std::int64_t one : held) {
    model.free(one);
  }
  ASSERT_TRUE(model.allocate(120 * kMiB).has_value());  // the two largest, not the 50 and 30 MiB
  EXPECT_EQ(model.now().reserved, (50 + 30 + 120) * kMiB);
  EXPECT_EQ(model.retries(), 0);
}

TEST(AllocatorModel, ExpandableSegmentsGrowByPages) {
  AllocatorModel model({.expandable_segments = true});
  model.allocate(1);
  EXPECT_EQ(model.now().reserved, 2 * kMiB);
  model.allocate(3 * kMiB);
  EXPECT_EQ(model.now().reserved, 22 * kMiB);
  const auto large = model.allocate(30 * kMiB);  // 17 MiB are free, 13 more
  EXPECT_EQ(model.block(*large).size, 30 * kMiB);
  EXPECT_EQ(model.now().reserved, 42 * kMiB);
  EXPECT_EQ(model.segments().size(), 2U);
  EXPECT_EQ(model.now().inactive_split, 0);
}

TEST(AllocatorModel, ExpandableSegmentsGiveBackWholeFreePages) {
  AllocatorModel model({.expandable_segments = true});
  const auto first = model.allocate(5 * kMiB);
  const auto middle = model.allocate(50 * kMiB);
  model.allocate(5 * kMiB);
  model.free(*middle);  // from 5 to 55 MiB: one whole page, from 20 to 40
  model.empty_cache();
  EXPECT_EQ(model.now().reserved, 40 * kMiB);
  EXPECT_EQ(model.segments().size(), 2U);
  model.allocate(45 * kMiB);  // the gap is filled again before the segment grows
  EXPECT_EQ(model.now().reserved, 60 * kMiB);
  EXPECT_EQ(address_of(model, 45 * kMiB), 5 * kMiB);
  model.free(*first);
}

TEST(AllocatorModel, ABlockThatCanGrowIsKeptForLargeRequests) {
  AllocatorModel model({.expandable_segments = true});
  const auto gap = model.allocate(8 * kMiB);
  model.allocate(6 * kMiB);  // the last 6 MiB of the page can grow
  model.free(*gap);
  model.allocate(5 * kMiB);
  EXPECT_EQ(address_of(model, 5 * kMiB), 0);
}

TEST(AllocatorModel, ExactlyTheBytesOfTheCpu) {
  AllocatorModel model({.kind = AllocatorKind::exact, .capacity = 1000});
  const auto a = model.allocate(999);
  EXPECT_FALSE(model.allocate(2).has_value());
  ASSERT_TRUE(model.allocate(1).has_value());
  EXPECT_EQ(model.now(), (AllocatorUse{1000, 1000, 1000, 0}));
  model.free(*a);
  EXPECT_EQ(model.now(), (AllocatorUse{1, 1, 1, 0}));
  EXPECT_EQ(model.peak().allocated, 1000);
  model.reset_peak();
  EXPECT_EQ(model.peak().allocated, 1);
  EXPECT_TRUE(model.segments().empty());
}

TEST(AllocatorModel, RefusesWrongArguments) {
  EXPECT_THROW(AllocatorModel({.capacity = -1}), std::invalid_argument);
  EXPECT_THROW(AllocatorModel({.max_split_size = 20 * kMiB}), std::invalid_argument);
  EXPECT_THROW(AllocatorModel({.max_non_split_rounding = -1}), std::invalid_argument);
  EXPECT_THROW(AllocatorModel({.large_segment_size = 21 * kMiB}), std::invalid_argument);
  EXPECT_THROW(AllocatorModel({.roundup_power2_divisions = 3}), std::invalid_argument);
  EXPECT_THROW(AllocatorModel({.roundup_power2_divisions = -4}), std::invalid_argument);
  AllocatorModel model;
  EXPECT_THROW(model.allocate(-1), std::invalid_argument);
  EXPECT_THROW(model.allocate((std::int64_t{1} << 50) + 1), std::invalid_argument);
  EXPECT_THROW(model.free(0), std::invalid_argument);
  EXPECT_THROW(static_cast<void>(model.block(-1)), std::invalid_argument);
  EXPECT_THROW(model.set_capacity(-1), std::invalid_argument);
}

TEST(AllocatorModel, RefusesSegmentsThatCannotBe) {
  AllocatorModel model;
  model.allocate(3 * kMiB);
  model.allocate(30 * kMiB);
  auto segments = model.segments();
  std::ranges::reverse(segments);
  EXPECT_THROW(AllocatorModel({}, segments), std::invalid_argument);
  std::ranges::reverse(segments);
  segments.front().blocks.pop_back();
  EXPECT_THROW(AllocatorModel({}, segments), std::invalid_argument);
}

TEST(AllocatorModel, WithoutALimitTheLargestRequestsAddUpToTheLimitOfNumbers) {
  for (const bool expandable : {false, true}) {
    AllocatorModel model({.expandable_segments = expandable});
    std::int64_t count = 0;
    while (model.allocate(std::int64_t{1} << 50) && count < 10000) {
      ++count;
    }
    EXPECT_GE(count, 8000);
    EXPECT_LT(count, 8192);
    EXPECT_GT(model.now().reserved, 0);
  }
}

// ------------------------------------------------------------------ random sequences

struct RandomEvents {
  std::mt19937_64 random;
  double log_largest;
  std::int64_t hold;
  int streams;
  std::vector<std::int64_t> usual;

  RandomEvents(std::uint64_t seed, std::int64_t largest, std::int64_t held, int used_streams)
      : random(seed),
        log_largest(std::log(static_cast<double>(largest))),
        hold(held),
        streams(used_streams) {
    for (int i = 0; i < 8; ++i) {
      usual.push_back(any_size());
    }
  }

  double unit() { return std::uniform_real_distribution<double>(0, 1)(random); }
  std::int64_t any_size() { return static_cast<std::int64_t>(std::exp(unit() * log_largest)); }
  std::int64_t size() { return unit() < 0.5 ? any_size() : usual[random() % usual.size()]; }
  std::int64_t stream() {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(streams));
  }
};

void check_blocks(const AllocatorModel& model) {
  AllocatorUse use;
  std::int64_t end = -1;
  for (const AllocatorSegment& segment : model.segments()) {
    ASSERT_GE(segment.address, end);
    end = segment.address;
    bool last_free = false;
    for (const AllocatorBlock& block : segment.blocks) {
      ASSERT_EQ(block.address, end) << "blocks follow each other without gap or overlap";
      ASSERT_GT(block.size, 0);
      ASSERT_FALSE(last_free && !block.allocated) << "free neighbours are merged";
      ASSERT_LE(block.requested, block.size);
      last_free = !block.allocated;
      end += block.size;
      use.requested += block.requested;
      use.allocated += block.allocated ? block.size : 0;
    }
    ASSERT_EQ(end, segment.address + segment.size);
    use.reserved += segment.size;
  }
  use.inactive_split = model.now().inactive_split;
  ASSERT_EQ(use, model.now());
  ASSERT_LE(use.requested, use.allocated);
  ASSERT_LE(use.allocated + use.inactive_split, use.reserved);
}

class AllocatorModelSettings : public ::testing::TestWithParam<AllocatorOptions> {};

TEST_P(AllocatorModelSettings, AgreeWithTheSlowAllocatorInEveryEvent) {
  int failures = 0;
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    RandomEvents events(seed, seed % 3 == 0 ? 3 * kMiB : 120 * kMiB, 300 * kMiB,
                        1 + static_cast<int>(seed % 2) * 2);
    AllocatorModel model(GetParam());
    SlowAllocator slow(GetParam());
    std::vector<std::pair<std::int64_t, std::int64_t>> held;  // allocation, address in the slow one
    for (int i = 0; i < 600; ++i) {
      const double chance = events.unit();
      if (chance < 0.005) {
        model.empty_cache();
        slow.release();
      } else if (!held.empty() && (model.now().requested > events.hold || chance < 0.4)) {
        const auto which = static_cast<std::ptrdiff_t>(events.random() % held.size());
        model.free(held[static_cast<std::size_t>(which)].first);
        slow.free(held[static_cast<std::size_t>(which)].second);
        held.erase(held.begin() + which);
      } else {
        const std::int64_t size = events.size();
        const std::int64_t stream = events.stream();
        const auto allocation = model.allocate(size, stream);
        const std::int64_t address = slow.allocate(size, stream);
        ASSERT_EQ(allocation.has_value(), address >= 0) << "event " << i << " of seed " << seed;
        if (allocation) {
          held.emplace_back(*allocation, address);
        } else {
          ++failures;
        }
      }
      ASSERT_EQ(model.now(), slow.use()) << "event " << i << " of seed " << seed;
      ASSERT_EQ(model.retries(), slow.retries);
      if (i % 50 == 0) {
        check_blocks(model);
      }
    }
    for (const auto& [allocation, address] : held) {
      model.free(allocation);
    }
    EXPECT_EQ(model.now().allocated, 0);
    EXPECT_EQ(model.now().inactive_split, 0);
    model.empty_cache();
    EXPECT_EQ(model.now(), AllocatorUse{});
    EXPECT_TRUE(model.segments().empty());
  }
  EXPECT_EQ(failures > 0, GetParam().capacity != kUnlimited);
}

TEST_P(AllocatorModelSettings, ACopyGoesOnByItself) {
  RandomEvents events(7, 60 * kMiB, 200 * kMiB, 2);
  AllocatorModel model(GetParam());
  std::vector<std::int64_t> held;
  for (int i = 0; i < 200; ++i) {
    if (const auto allocation = model.allocate(events.size(), events.stream());
        allocation && i % 3 != 0) {
      model.free(*allocation);
    } else if (allocation) {
      held.push_back(*allocation);
    }
  }
  AllocatorModel copy = model;
  const AllocatorUse before = model.now();
  for (const std::int64_t allocation : held) {
    copy.free(allocation);
  }
  copy.empty_cache();
  EXPECT_EQ(copy.now(), AllocatorUse{});
  EXPECT_EQ(model.now(), before);
  check_blocks(model);
}

TEST_P(AllocatorModelSettings, OneThatBeginsWithTheSegmentsGoesOnAlike) {
  RandomEvents events(11, 60 * kMiB, 200 * kMiB, 2);
  AllocatorModel model(GetParam());
  const auto run = [&](const auto& allocate, const auto& free_one) {
    for (int i = 0; i < 300; ++i) {
      if (!model.held().empty() && (model.now().requested > events.hold || events.unit() < 0.4)) {
        const auto held = model.held();
        auto which = held.begin();
        std::advance(which, events.random() % held.size());
        free_one(which->first, which->second);
      } else {
        allocate(events.size(), events.stream());
      }
    }
  };
  run([&](auto bytes, auto stream) { model.allocate(bytes, stream); },
      [&](auto, auto allocation) { model.free(allocation); });
  ASSERT_FALSE(model.held().empty());
  AllocatorModel other(GetParam(), model.segments());
  ASSERT_EQ(other.now(), model.now());
  run(
      [&](auto bytes, auto stream) {
        ASSERT_EQ(other.allocate(bytes, stream).has_value(),
                  model.allocate(bytes, stream).has_value());
        ASSERT_EQ(other.now(), model.now());
      },
      [&](auto address, auto allocation) {
        ASSERT_TRUE(other.held().contains(address));
        model.free(allocation);
        other.free(other.held().at(address));
        ASSERT_EQ(other.now(), model.now());
      });
  check_blocks(other);
}

INSTANTIATE_TEST_SUITE_P(
    All, AllocatorModelSettings,
    ::testing::Values(AllocatorOptions{}, AllocatorOptions{.capacity = 331 * kMiB},
                      AllocatorOptions{.expandable_segments = true},
                      AllocatorOptions{.capacity = 331 * kMiB, .expandable_segments = true},
                      AllocatorOptions{.capacity = 351 * kMiB, .max_split_size = 40 * kMiB},
                      AllocatorOptions{.capacity = 401 * kMiB,
                                       .max_split_size = 50 * kMiB,
                                       .max_non_split_rounding = 8 * kMiB},
                      AllocatorOptions{.large_segment_size = 32 * kMiB},
                      AllocatorOptions{.capacity = 331 * kMiB,
                                       .expandable_segments = true,
                                       .large_segment_size = 10 * kMiB},
                      AllocatorOptions{.roundup_power2_divisions = 8}));

}  // namespace
}  // namespace brim
