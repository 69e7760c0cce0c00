#include <brim/adapt/adapt.h>
#include <brim/adapt/detail/throughput.h>
#include <brim/adapt/size_memory.h>
#include <brim/testing/clock_by_hand.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <vector>

#include "adapt/calls.h"
#include "need/memory_simulation.h"

namespace brim {
namespace {

using namespace tests;
using Sizes = std::vector<std::int64_t>;

Attempt fit_at_rate(std::int64_t size, double rate) {
  return {.values = {size}, .seconds = 1, .rate = rate};
}

/// The sizes chosen one after the other when each is then measured.
Sizes choices(const std::function<double(std::int64_t)>& rate, std::int64_t largest, int count,
              std::int64_t lower = 1, std::int64_t quantum = 1) {
  std::vector<Attempt> attempts;
  Sizes chosen;
  for (int i = 0; i < count; ++i) {
    chosen.push_back(throughput_choice(attempts, largest, lower, quantum));
    attempts.push_back(fit_at_rate(chosen.back(), rate(chosen.back())));
  }
  return chosen;
}

TEST(Throughput, HalvesAsLongAsTheRateStaysAndThenTakesTheSmallestThatIsAsFast) {
  // Saturates at 128: below it, half the size is half as fast.
  const auto saturating = [](std::int64_t size) {
    return static_cast<double>(std::min<std::int64_t>(size, 128));
  };
  EXPECT_EQ(choices(saturating, 1024, 7), (Sizes{1024, 512, 256, 128, 64, 128, 128}));
}

TEST(Throughput, TheLargestStaysWhereSmallerIsSlower) {
  EXPECT_EQ(
      choices([](std::int64_t size) { return std::sqrt(static_cast<double>(size)); }, 1000, 4),
      (Sizes{1000, 500, 1000, 1000}));
}

TEST(Throughput, AFlatRateGoesToTheFloorAndStays) {
  const auto flat = [](std::int64_t) { return 5.0; };
  EXPECT_EQ(choices(flat, 16, 7), (Sizes{16, 8, 4, 2, 1, 1, 1}));
  EXPECT_EQ(choices(flat, 16, 5, 5), (Sizes{16, 8, 5, 5, 5}));
  EXPECT_EQ(choices(flat, 100, 4, 1, 32), (Sizes{100, 32, 16, 8}));
}

TEST(Throughput, TwoPercentAreNegligibleAndThreeAreNot) {
  const auto slower_below_100 = [](double part) {
    return [part](std::int64_t size) { return size < 100 ? part : 1.0; };
  };
  EXPECT_EQ(choices(slower_below_100(0.985), 100, 3)[2], 25);
  EXPECT_EQ(choices(slower_below_100(0.97), 100, 3)[2], 100);
}

TEST(Throughput, WhatDoesNotFitNowDoesNotCount) {
  const std::vector<Attempt> attempts{fit_at_rate(1000, 50.0), fit_at_rate(500, 50.0),
                                      fit_at_rate(100, 10.0)};
  EXPECT_EQ(throughput_choice(attempts, 100, 1, 1), 50) << "of those that fit, 100 is the best";
  EXPECT_EQ(throughput_choice(attempts, 300, 1, 1), 300) << "and 300 has not been measured";
}

TEST(Throughput, AShortLastPartIsNoSizeToChoose) {
  // 35 in parts of 16: the last one has 3.
  const std::vector<Attempt> attempts{fit_at_rate(16, 5.0), fit_at_rate(8, 1.0),
                                      fit_at_rate(3, 9.0)};
  EXPECT_EQ(throughput_choice(attempts, 16, 8, 8), 16) << "3 is below the floor";
  const std::vector<Attempt> others{fit_at_rate(16, 5.0), fit_at_rate(8, 1.0),
                                    fit_at_rate(11, 9.0)};
  EXPECT_EQ(throughput_choice(others, 16, 1, 8), 16) << "11 is no multiple of 8";
  EXPECT_EQ(throughput_choice(others, 16, 1, 1), 5) << "here it is as good as any";
}

TEST(Throughput, FailuresAndFitsThatWereNotMeasuredDoNotCount) {
  std::vector<Attempt> attempts{fit_at_rate(64, 0.0)};
  EXPECT_EQ(throughput_choice(attempts, 64, 1, 1), 64);
  attempts.push_back({.values = {64}, .outcome = OomKind::host_memory, .rate = 9.0});
  EXPECT_EQ(throughput_choice(attempts, 64, 1, 1), 64);
  EXPECT_EQ(throughput_choice({}, 64, 1, 1), 64);
}

TEST(Throughput, ChoiceIsAlwaysAllowedAndEnds) {
  simulation::Random random(31);
  for (int i = 0; i < 3000; ++i) {
    const std::int64_t largest = random.magnitude(1, 1e9);
    const std::int64_t lower = random.integer(1, largest);
    const std::int64_t quantum = random.magnitude(1, 500);
    const Sizes chosen =
        choices([&](std::int64_t) { return random.real(0.1, 10); }, largest, 70, lower, quantum);
    for (const std::int64_t size : chosen) {
      ASSERT_TRUE(size >= lower && size <= largest);
      ASSERT_TRUE(size == largest || size == lower || size <= quantum || size % quantum == 0)
          << size;
    }
    ASSERT_EQ(chosen[68], chosen[69]) << "it settles";
  }
}

// ---------------------------------------------------------------- in calls

class TimedCalls : public ::testing::Test {
 protected:
  void take(int milliseconds) { clock_.advance(std::chrono::milliseconds(milliseconds)); }

 private:
  testing::ClockByHand clock_;
};

TEST_F(TimedCalls, BatchSettlesAtTheSizeWithTheBestRate) {
  SizeMemory memory;
  Sizes tried;
  for (int i = 0; i < 8; ++i) {
    batch(64,
          [&](std::int64_t size) {
            tried.push_back(size);
            take(size == 32 ? 1 : 100);
          },
          {.objective = Objective::throughput, .memory = &memory});
  }
  EXPECT_EQ(tried, (Sizes{64, 64, 32, 32, 16, 16, 32, 32}));
}

TEST_F(TimedCalls, TheFirstRunOfASizeIsNotCounted) {
  SizeMemory memory;
  Sizes tried;
  for (int i = 0; i < 6; ++i) {
    batch(64,
          [&](std::int64_t size) {
            tried.push_back(size);
            take(tried.size() == 1 ? 500 : 50);  // one-time work
          },
          {.objective = Objective::throughput, .memory = &memory});
  }
  EXPECT_EQ(tried, (Sizes{64, 64, 32, 32, 64, 64}));
}

TEST(Throughput, ARateOfAnotherProcessOutlastsTheFirstRunOfThisOne) {
  std::vector<Attempt> attempts{{.values = {64}, .rate = 50.0}};  // as read from a file
  add_attempt(attempts, fit_at_rate(64, 1.0));
  EXPECT_EQ(attempts.back().rate, 50.0);
  add_attempt(attempts, fit_at_rate(64, 40.0));
  EXPECT_EQ(attempts.back().rate, 40.0);
}

TEST_F(TimedCalls, RangeStepsStayAllowed) {
  SizeMemory memory;
  for (int call = 0; call < 5; ++call) {
    std::int64_t last = 0;
    range(0, 35, 16,
          [&](std::int64_t begin, std::int64_t end) {
            last = end - begin;
            ASSERT_TRUE(last == 8 || last == 16 || end == 35) << last;
            take(last >= 8 ? 8 : 1);  // the short parts look fast
          },
          {.objective = Objective::throughput, .lower = 8, .quantum = 8, .memory = &memory});
  }
}

TEST_F(TimedCalls, BatchStaysWithinWhatFits) {
  const Budget budget = room_for(kMiB);  // else what is available would change from call to call
  SizeMemory memory;
  Sizes tried;
  for (int i = 0; i < 8; ++i) {
    batch(64,
          [&](std::int64_t size) {
            if (size > 40) {
              throw_out_of_memory();
            }
            tried.push_back(size);
            take(size > 32 ? 1 : size > 20 ? 10 : 100);
          },
          {.objective = Objective::throughput, .memory = &memory});
  }
  EXPECT_EQ(tried[0], 32);
  EXPECT_EQ(std::ranges::count_if(tried, [](std::int64_t size) { return size <= 20; }), 2)
      << "a smaller size is timed twice, and is slower";
  EXPECT_GE(tried.back(), 32);
}

TEST_F(TimedCalls, RangeSettlesAtTheSizeWithTheBestRate) {
  Sizes tried;
  range(0, 1000, 64,
        [&](std::int64_t begin, std::int64_t end) {
          tried.push_back(end - begin);
          take(end - begin == 32 ? 1 : 100);
        },
        {.objective = Objective::throughput});
  ASSERT_GT(tried.size(), 4U);
  EXPECT_EQ(tried[tried.size() - 2], 32) << ::testing::PrintToString(tried);
}

}  // namespace
}  // namespace brim
