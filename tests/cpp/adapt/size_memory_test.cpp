#include <brim/adapt/adapt.h>
#include <brim/adapt/size_memory.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <vector>

#include "adapt/calls.h"

namespace brim {
namespace {

using namespace tests;

Attempt tried_at(std::int64_t size, bool fitted, std::int64_t peak = 100) {
  return {.values = {size},
          .outcome = fitted ? OomKind::none : OomKind::host_memory,
          .peak = peak,
          .held = 10,
          .available = 990,
          .seconds = 1,
          .rate = fitted ? 2.5 : 0.0};
}

std::vector<std::int64_t> sizes(const std::vector<Attempt>& attempts) {
  std::vector<std::int64_t> result;
  for (const Attempt& it : attempts) {
    result.push_back(it.size());
  }
  return result;
}

TEST(SizeMemory, KnowsWhatItWasToldOldestFirst) {
  SizeMemory memory;
  EXPECT_FALSE(memory.may_know_something());
  EXPECT_TRUE(memory.recall(1).empty());
  EXPECT_FALSE(memory.may_know_something()) << "asking is not knowing";
  memory.learn(1, tried_at(5, true));
  memory.learn(1, tried_at(9, false));
  memory.learn(2, tried_at(7, true));
  EXPECT_TRUE(memory.may_know_something());
  EXPECT_EQ(sizes(memory.recall(1)), (std::vector<std::int64_t>{5, 9}));
  EXPECT_EQ(sizes(memory.recall(2)), (std::vector<std::int64_t>{7}));
  const Attempt known = memory.recall(1).front();
  EXPECT_TRUE(known.fitted());
  EXPECT_EQ(known.peak, 100);
  EXPECT_EQ(known.available, 990);
  EXPECT_EQ(known.held, 10);
  EXPECT_EQ(known.rate, 0.0) << "the first run of a size is not counted";
  memory.learn(1, tried_at(5, true));
  EXPECT_EQ(memory.recall(1).back().rate, 2.5);
}

TEST(SizeMemory, KeepsThousandsOfKeys) {
  SizeMemory memory;
  for (std::uint64_t key = 1; key <= 5000; ++key) {
    memory.learn(key, tried_at(5, true));
  }
  EXPECT_EQ(memory.size(), 4096U);
  EXPECT_FALSE(memory.recall(5000 - 4095).empty());
  EXPECT_TRUE(memory.recall(5000 - 4096).empty()) << "the least recently used go first";
}

TEST(SizeMemory, NewsOfTheSameSizeReplacesTheOld) {
  SizeMemory memory;
  memory.learn(1, tried_at(5, true, 100));
  memory.learn(1, tried_at(6, true));
  memory.learn(1, tried_at(5, true, 200));
  ASSERT_EQ(sizes(memory.recall(1)), (std::vector<std::int64_t>{6, 5}));
  EXPECT_EQ(memory.recall(1).back().peak, 200);
  memory.learn(1, tried_at(5, false));
  EXPECT_EQ(memory.recall(1).size(), 3U) << "a size may have fitted once and failed once";
}

TEST(SizeMemory, KeepsTheNewestFewOfEachKind) {
  SizeMemory memory;
  memory.learn(1, tried_at(1000, false));
  for (std::int64_t size = 1; size <= 100; ++size) {
    memory.learn(1, tried_at(size, true));
  }
  const auto known = sizes(memory.recall(1));
  EXPECT_LE(known.size(), SizeMemory::kAttemptsPerKey);
  EXPECT_EQ(known.front(), 1000) << "many fits do not push out the failure";
  EXPECT_EQ(known.back(), 100);
  for (std::int64_t size = 2000; size <= 2100; ++size) {
    memory.learn(1, tried_at(size, false));
  }
  EXPECT_EQ(memory.recall(1).size(), SizeMemory::kAttemptsPerKey);
  EXPECT_EQ(memory.recall(1).front().size(), 93);
}

TEST(SizeMemory, TheLeastRecentlyUsedKeyIsDropped) {
  SizeMemory memory(3);
  for (const std::uint64_t key : {1, 2, 3}) {
    memory.learn(key, tried_at(5, true));
  }
  memory.recall(1);
  memory.learn(4, tried_at(5, true));
  EXPECT_EQ(memory.size(), 3U);
  EXPECT_TRUE(memory.recall(2).empty());
  EXPECT_FALSE(memory.recall(1).empty());
  EXPECT_FALSE(memory.recall(3).empty());
  EXPECT_FALSE(memory.recall(4).empty());
  EXPECT_CONTAINS(message_of<c10::ValueError>([] { SizeMemory{0}; }), "capacity must be 1 or more");
}

TEST(SizeMemory, ForgetsOneKeyOrAll) {
  SizeMemory memory;
  memory.learn(1, tried_at(5, true));
  memory.learn(2, tried_at(6, true));
  memory.forget(1);
  memory.forget(77);
  EXPECT_TRUE(memory.recall(1).empty());
  EXPECT_EQ(memory.recall(2).size(), 1U);
  memory.clear();
  EXPECT_TRUE(memory.recall(2).empty());
  EXPECT_FALSE(memory.may_know_something());
}

TEST(SizeMemory, ThreadsDoNotCorruptIt) {
  SizeMemory memory(5);
  in_threads(8, [&](int thread) {
    for (int i = 0; i < 2000; ++i) {
      const auto key = static_cast<std::uint64_t>((i + thread) % 9);
      // All attempts of a key have a size that tells the key.
      memory.learn(key, tried_at(static_cast<std::int64_t>(key) * 100 + 1 + i % 40, i % 3 != 0));
      for (const Attempt& known : memory.recall(key)) {
        ASSERT_EQ(known.size() / 100, static_cast<std::int64_t>(key));
      }
      if (i % 50 == 0) {
        memory.forget(key);
      }
      if (i % 500 == 0) {
        memory.clear();
      }
      ASSERT_LE(memory.size(), 5U);
    }
  });
}

TEST(SizeMemory, DefaultDirectoryFollowsTheEnvironment) {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  const std::string cache = variable("XDG_CACHE_HOME");
  const std::string home = variable("HOME");
  setenv("XDG_CACHE_HOME", "/some/cache", 1);
  EXPECT_EQ(SizeMemory::default_directory(), "/some/cache/brim/sizes");
  setenv("XDG_CACHE_HOME", "", 1);
  setenv("HOME", "/some/home", 1);
  EXPECT_EQ(SizeMemory::default_directory(), "/some/home/.cache/brim/sizes");
  unsetenv("HOME");
  EXPECT_CONTAINS(message_of<c10::Error>([] { SizeMemory::default_directory(); }),
                  "neither XDG_CACHE_HOME nor HOME is set");
  cache.empty() ? unsetenv("XDG_CACHE_HOME") : setenv("XDG_CACHE_HOME", cache.c_str(), 1);
  setenv("HOME", home.c_str(), 1);
}

// ---------------------------------------------------------------- what calls make of it

class RememberedCalls : public ::testing::Test {
 protected:
  /// The sizes that one call tries when there is room for so many bytes.
  std::vector<std::int64_t> tried(std::int64_t room, std::uint64_t key = 1,
                                  AffineWork work = {.base = kMiB, .slope = 1024}) {
    const Budget budget = room_for(room);
    std::vector<Attempt> attempts;
    batch(100'000, work, {.memory = &memory_, .key = key, .attempts = &attempts});
    return sizes_of(attempts);
  }

  static constexpr std::int64_t most(std::int64_t room) { return (room - kMiB) / 1024; }
  static void expect_near(std::int64_t size, std::int64_t most) {
    EXPECT_LE(size, most);
    EXPECT_GE(size, most * 97 / 100);
  }

  SizeMemory memory_;
};

TEST_F(RememberedCalls, TheNextCallFitsAtOnce) {
  EXPECT_GT(tried(9 * kMiB).size(), 1U);
  EXPECT_EQ(tried(9 * kMiB).size(), 1U);
  const auto third = tried(9 * kMiB);
  ASSERT_EQ(third.size(), 1U);
  expect_near(third.front(), most(9 * kMiB));
}

TEST_F(RememberedCalls, SizesGrowWhenMoreMemoryIsFree) {
  tried(5 * kMiB);
  const auto more = tried(20 * kMiB);
  expect_near(more.back(), most(20 * kMiB));
  EXPECT_LE(more.size(), 2U) << ::testing::PrintToString(more);
}

TEST_F(RememberedCalls, SizesShrinkWithoutAFailureWhenLessIsFree) {
  tried(20 * kMiB);
  for (const std::int64_t room : {16, 8, 3}) {
    const auto less = tried(room * kMiB);
    EXPECT_EQ(less.size(), 1U) << ::testing::PrintToString(less);
    EXPECT_LE(less.back(), most(room * kMiB));
    EXPECT_GE(less.back(), most(room * kMiB) * 80 / 100) << room;
  }
}

TEST_F(RememberedCalls, OneKeySaysNothingAboutAnother) {
  tried(9 * kMiB, 1, {.base = 0, .slope = kMiB});
  const auto other = tried(9 * kMiB, 2);
  EXPECT_EQ(other.front(), 100'000) << "nothing is held back";
  expect_near(other.back(), most(9 * kMiB));
  const auto again = tried(9 * kMiB, 1, {.base = 0, .slope = kMiB});
  ASSERT_EQ(again.size(), 1U) << "nor endangered";
  EXPECT_GE(again.front(), 8);
}

TEST_F(RememberedCalls, ASmallCallDoesNotHoldBackALargerOne) {
  const Budget budget = room_for(9 * kMiB);
  const AffineWork work{.base = kMiB, .slope = 1024};
  for (int i = 0; i < 3; ++i) {
    std::vector<Attempt> attempts;
    batch(10, work, {.memory = &memory_, .key = 1, .attempts = &attempts});
    EXPECT_EQ(sizes_of(attempts), (std::vector<std::int64_t>{10}));
  }
  std::vector<Attempt> attempts;
  batch(5000, work, {.memory = &memory_, .key = 1, .attempts = &attempts});
  EXPECT_EQ(attempts.back().values.front(), 5000) << "what is remembered is a limit, not a size";
}

TEST_F(RememberedCalls, ForgettingStartsOver) {
  tried(9 * kMiB);
  memory_.forget(1);
  EXPECT_EQ(tried(9 * kMiB).front(), 100'000);
  memory_.clear();
  EXPECT_EQ(tried(9 * kMiB).front(), 100'000);
}

TEST_F(RememberedCalls, EightThreadsShareOneMemory) {
  std::atomic<int> wrong{0};
  in_threads(8, [&](int thread) {
    const auto key = static_cast<std::uint64_t>(thread % 3);
    const std::int64_t most = 10 * (1 + thread % 3);
    for (int i = 0; i < 100; ++i) {
      std::int64_t covered = 0;
      range(0, 200, 64,
            [&](std::int64_t begin, std::int64_t end) {
              if (end - begin > most) {
                throw_out_of_memory();
              }
              wrong += begin == covered ? 0 : 1;
              covered = end;
            },
            {.memory = &memory_, .key = key});
      wrong += covered == 200 ? 0 : 1;
      const std::int64_t size = batch(64,
                                      [&](std::int64_t it) {
                                        if (it > most) {
                                          throw_out_of_memory();
                                        }
                                        return it;
                                      },
                                      {.memory = &memory_, .key = 10 + key});
      wrong += size >= 1 && size <= most ? 0 : 1;
    }
  });
  EXPECT_EQ(wrong.load(), 0);
}

}  // namespace
}  // namespace brim
