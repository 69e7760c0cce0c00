// least_kept: worked examples, and random programs against every possible choice.

#include <brim/predict/least_kept.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace brim {
namespace {

using Values = std::vector<ComputedValue>;
using Places = std::vector<std::size_t>;

/// Whether every needed value is kept or can be recomputed, tried out until nothing is added.
bool suffices(const Values& values, const Places& needed, const std::vector<bool>& kept) {
  std::vector<bool> there = kept;
  for (bool changed = true; changed;) {
    changed = false;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto& from = values[i].made_from;
      if (!there[i] && from && std::ranges::all_of(*from, [&](auto j) { return there[j]; })) {
        there[i] = changed = true;
      }
    }
  }
  return std::ranges::all_of(needed, [&](auto i) { return there[i]; });
}

std::int64_t bytes(const Values& values, const std::vector<bool>& kept) {
  std::int64_t result = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    result += kept[i] ? values[i].bytes : 0;
  }
  return result;
}

TEST(LeastKept, KeepsWhatSeveralAreMadeFrom) {
  const Values values{{10, {}}, {8, Places{0}}, {8, Places{0}}};
  EXPECT_EQ(least_kept(values, Places{1, 2}), (std::vector{true, false, false}));
  EXPECT_EQ(least_kept(values, Places{1}), (std::vector{false, true, false}));
  EXPECT_EQ(least_kept(values, Places{}), (std::vector{false, false, false}));
}

TEST(LeastKept, NeedsAllThatAValueIsMadeFrom) {
  const Values values{{3, {}}, {4, {}}, {6, Places{0, 1}}};
  EXPECT_EQ(least_kept(values, Places{2}), (std::vector{false, false, true}));
  EXPECT_EQ(least_kept(values, Places{0, 2}), (std::vector{true, true, false}));
}

TEST(LeastKept, KeepsNothingThatIsThereAnyway) {
  const Values values{{100, Places{}}, {5, Places{0}}, {5, {}}};
  EXPECT_EQ(least_kept(values, Places{0, 1}), (std::vector{false, false, false}));
}

TEST(LeastKept, RecomputesLeastAmongEquals) {
  const Values values{{4, {}}, {4, Places{0}}, {4, Places{1}}};
  EXPECT_EQ(least_kept(values, Places{2}), (std::vector{false, false, true}));
}

TEST(LeastKept, IsTheBestOfAllChoices) {
  std::mt19937 random(1);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  for (int round = 0; round < 400; ++round) {
    Values values(static_cast<std::size_t>(1 + below(11)));
    Places needed;
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i].bytes = below(9);
      if (below(4) != 0) {
        values[i].made_from.emplace();
        for (std::size_t j = 0; j < i; ++j) {
          if (below(3) == 0) {
            values[i].made_from->push_back(j);
          }
        }
      }
      if (below(3) == 0) {
        needed.push_back(i);
      }
    }
    std::int64_t best = std::numeric_limits<std::int64_t>::max();
    for (unsigned choice = 0; choice < 1U << values.size(); ++choice) {
      std::vector<bool> kept(values.size());
      for (std::size_t i = 0; i < values.size(); ++i) {
        kept[i] = (choice >> i & 1U) != 0;
      }
      const std::int64_t size = bytes(values, kept);
      if (size < best && suffices(values, needed, kept)) {
        best = size;
      }
    }
    const std::vector<bool> kept = least_kept(values, needed);
    ASSERT_TRUE(suffices(values, needed, kept)) << "round " << round;
    ASSERT_EQ(bytes(values, kept), best) << "round " << round;
  }
}

TEST(LeastKept, TakesProgramsOfAnyLength) {
  Values values{{7, {}}};
  for (std::size_t i = 1; i < 50'000; ++i) {
    values.push_back({9, Places{i - 1}});
  }
  const std::vector<bool> kept = least_kept(values, Places{values.size() - 1});
  EXPECT_TRUE(kept[0]);
  EXPECT_EQ(std::ranges::count(kept, true), 1);
}

TEST(LeastKept, RefusesPlacesOutsideAndNegativeBytes) {
  EXPECT_THROW((void)least_kept(Values{{-1, {}}}, Places{}), c10::ValueError);
  EXPECT_THROW((void)least_kept(Values{{1, Places{1}}}, Places{}), c10::ValueError);
  EXPECT_THROW((void)least_kept(Values{{1, {}}}, Places{1}), c10::ValueError);
}

}  // namespace
}  // namespace brim
