#include "adapt/detail/part_trials.h"

#include <brim/adapt/size_memory.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>
#include <vector>

namespace brim::detail {
namespace {

/// A batch in parts, under pressure above a size.
struct Work {
  std::int64_t items = 64;
  std::int64_t largest = 64;
  std::int64_t free = 32;  ///< the largest size that gives nothing up
  std::int64_t quantum = 1;
  double recomputing = 1.5;  ///< the time of an item under pressure, in that of others
  double per_part = 1.0;     ///< the time that a part takes beside its items
};

/// The sizes of so many calls, one after the other.
std::vector<std::int64_t> sizes(const Work& work, int calls, std::vector<Attempt> trials = {}) {
  std::vector<std::int64_t> result;
  for (int call = 0; call < calls; ++call) {
    const std::int64_t size = choose_part_size(trials, work.items, {1, work.largest, work.quantum});
    const auto parts = static_cast<double>((work.items + size - 1) / size);
    const bool gives_up = size > work.free;
    const double seconds =
        static_cast<double>(work.items) * (gives_up ? work.recomputing : 1) + parts * work.per_part;
    result.push_back(size);
    const auto known = std::ranges::find(trials, size, &Attempt::size);
    if (gives_up || !trials.empty()) {
      add_attempt(trials, {.values = {size},
                           .given_up = gives_up ? 1 : 0,
                           .seconds = seconds,
                           .rate = known == trials.end() ? 0 : 1 / seconds});
    }
  }
  return result;
}

TEST(PartTrials, WithoutPressureTheLargestSizeStays) {
  EXPECT_EQ(sizes({.free = 64}, 10), std::vector<std::int64_t>(10, 64));
  EXPECT_EQ(sizes({.largest = 50, .free = 50}, 10), std::vector<std::int64_t>(10, 50));
}

TEST(PartTrials, TheFasterOneStays) {
  EXPECT_EQ(sizes({.recomputing = 1.5}, 100).back(), 32);
  EXPECT_EQ(sizes({.recomputing = 1.5, .per_part = 40}, 100).back(), 64);
}

TEST(PartTrials, TheTrialIsOverAfterFewCalls) {
  EXPECT_EQ(sizes({}, 10), (std::vector<std::int64_t>{64, 64, 64, 64, 32, 32, 32, 32, 32, 32}));
}

TEST(PartTrials, PartsAreCutEvenlyBeforeThereAreMoreOfThem) {
  // Two parts of 32 give nothing up, where 50 and 14 did: no time is needed to tell.
  EXPECT_EQ(sizes({.largest = 50, .free = 40}, 5), (std::vector<std::int64_t>{50, 32, 32, 32, 32}));
}

TEST(PartTrials, TheFewestPartsThatGiveNothingUpAreFound) {
  for (std::int64_t free = 8; free < 64; ++free) {
    const auto all = sizes({.free = free, .per_part = 0.01}, 100);
    const std::int64_t parts = (64 + all.back() - 1) / all.back();
    const std::int64_t fewest = (64 + free - 1) / free;
    EXPECT_LE(all.back(), free);
    EXPECT_LE(parts - fewest, std::max<std::int64_t>(fewest / 4, 0)) << free;
    EXPECT_LE(std::set(all.begin(), all.end()).size(), SizeMemory::kAttemptsPerKey / 2);
  }
}

TEST(PartTrials, WherePressureNeverEndsTheLargestSizeStays) {
  const auto all = sizes({.free = 0}, 100);
  EXPECT_EQ(all.back(), 64);
  EXPECT_EQ(std::ranges::count(all, 64), 97);  // all but parts of 32, 16 and 8
}

TEST(PartTrials, AnErrorEndsTheTrials) {
  const std::vector<Attempt> trials{
      {.values = {64}, .given_up = 1, .calls = 4, .rate = 1},
      {.values = {32}, .outcome = OomKind::size_limit},
  };
  EXPECT_EQ(sizes({}, 10, trials), std::vector<std::int64_t>(10, 64));
}

TEST(PartTrials, SizesAreAllowedOnes) {
  for (const std::int64_t items : {5, 63, 100, 1000}) {
    for (const std::int64_t quantum : {1, 7, 8, 32}) {
      for (const std::int64_t largest : {std::int64_t{3}, items / 3 + 1, items}) {
        for (std::int64_t free = 0; free <= largest; free += largest / 5 + 1) {
          const Work work{.items = items, .largest = largest, .free = free, .quantum = quantum};
          for (const std::int64_t size : sizes(work, 60)) {
            EXPECT_EQ((SizeLattice{1, largest, quantum}.floor(size)), size);
          }
          const auto all = sizes(work, 60);
          EXPECT_EQ(std::set(all.end() - 20, all.end()).size(), 1U);  // settled
        }
      }
    }
  }
}

}  // namespace
}  // namespace brim::detail
