#include <brim/batching/balance.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "batching/reference.h"

namespace brim::batching {
namespace {

using namespace reference;

/// The least largest cost of all divisions under a cap; nothing if there is none.
std::optional<double> optimum(const Doubles& costs, const Doubles& sizes, double cap,
                              std::size_t parts, bool equal_count) {
  double best = std::numeric_limits<double>::infinity();
  Doubles loads(parts);
  Doubles totals(parts);
  std::vector<std::size_t> counts(parts);
  const std::function<void(std::size_t)> place = [&](std::size_t item) {
    if (item == costs.size()) {
      const auto [least, most] = std::ranges::minmax(counts);
      if (!equal_count || most - least <= 1) {
        best = std::min(best, std::ranges::max(loads));
      }
      return;
    }
    for (std::size_t p = 0; p < parts; ++p) {
      if (totals[p] + sizes[item] > cap) {
        continue;
      }
      const double load = loads[p];
      loads[p] += costs[item];
      totals[p] += sizes[item];
      ++counts[p];
      place(item + 1);
      loads[p] = load;
      totals[p] -= sizes[item];
      --counts[p];
      if (counts[p] == 0) {
        break;  // the other empty parts are alike
      }
    }
  };
  place(0);
  return std::isinf(best) ? std::nullopt : std::optional(best);
}

/// All items once, no part over the cap, none empty unless items are too few; the largest load.
double checked(const Batches& division, const Doubles& costs, const Cap& cap, std::size_t parts,
               bool equal_count) {
  EXPECT_EQ(division.count(), parts);
  std::vector<std::int64_t> seen;
  std::size_t least = costs.size();
  std::size_t most = 0;
  for (std::size_t p = 0; p < division.count(); ++p) {
    double total = 0.0;
    for (const std::int64_t item : division[p]) {
      total += cap.sizes[static_cast<std::size_t>(item)];
    }
    EXPECT_LE(total, cap.most);
    EXPECT_TRUE(std::ranges::is_sorted(division[p]));
    seen.insert(seen.end(), division[p].begin(), division[p].end());
    least = std::min(least, division[p].size());
    most = std::max(most, division[p].size());
  }
  std::ranges::sort(seen);
  std::vector<std::int64_t> all(costs.size());
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(seen, all);
  EXPECT_EQ(least > 0, costs.size() >= parts);
  if (equal_count) {
    EXPECT_LE(most - least, 1U);
  }
  return std::ranges::max(division.loads);
}

std::string refusal(const Doubles& costs, std::int64_t parts, const Cap& cap,
                    bool equal_count = false) {
  try {
    (void)balance(costs, parts, cap, equal_count);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "none";
}

Doubles whole_numbers(Random& random, std::size_t count, std::int64_t least, std::int64_t most) {
  Doubles result(count);
  std::ranges::generate(result, [&] { return static_cast<double>(any_int(random, least, most)); });
  return result;
}

Doubles work_of(const Doubles& sizes) {
  Doubles work(sizes.size());
  std::ranges::transform(sizes, work.begin(), [](double size) { return flops(size, 10); });
  return work;
}

TEST(Capped, FindsADivisionWhereverThereIsOneOfAFewItems) {
  Random random(1);
  int impossible = 0;
  int tight = 0;
  for (int round = 0; round < 250; ++round) {
    const auto items = static_cast<std::size_t>(any_int(random, 1, 8));
    const Doubles sizes = whole_numbers(random, items, 0, 12);
    const Doubles costs = round % 2 == 0 ? work_of(sizes) : whole_numbers(random, items, 0, 12);
    const auto cap = static_cast<double>(any_int(random, 12, 20));
    for (const bool equal_count : {false, true}) {
      std::size_t fewest = 0;
      for (std::size_t parts = 1; parts <= items; ++parts) {
        const auto best = optimum(costs, sizes, cap, parts, equal_count);
        fewest = fewest == 0 && best ? parts : fewest;
        if (!best) {
          ++impossible;
          EXPECT_NE(refusal(costs, static_cast<std::int64_t>(parts), {sizes, cap}, equal_count),
                    "none");
          continue;
        }
        const Batches division =
            balance(costs, static_cast<std::int64_t>(parts), {sizes, cap}, equal_count);
        const double found = checked(division, costs, {sizes, cap}, parts, equal_count);
        EXPECT_GE(found, *best - 1e-9);
        EXPECT_LE(found, 2 * *best + 1e-9);
        const Batches free = balance(costs, static_cast<std::int64_t>(parts), equal_count);
        tight += std::ranges::max(free.loads) < *best - 1e-9 ? 1 : 0;
      }
      EXPECT_EQ(fewest_parts({sizes, cap}, 1, equal_count), static_cast<std::int64_t>(fewest));
    }
  }
  EXPECT_GT(impossible, 50);
  EXPECT_GT(tight, 20) << "the cap must make a difference";
}

TEST(Capped, IsCloseToTheBestDivisionOfAFewItems) {
  Random random(2);
  double excess = 0.0;
  constexpr int kRounds = 60;
  for (int round = 0; round < kRounds; ++round) {
    const Doubles sizes = whole_numbers(random, 9, 1, 30);
    const Doubles costs = work_of(sizes);
    const double cap = std::ceil(std::reduce(sizes.begin(), sizes.end()) / 3 * 1.15) + 10;
    const auto best = optimum(costs, sizes, cap, 3, false);
    ASSERT_TRUE(best);
    const Batches division = balance(costs, 3, {sizes, cap});
    excess += checked(division, costs, {sizes, cap}, 3, false) / *best - 1;
  }
  EXPECT_LT(excess / kRounds, 0.03);
}

TEST(Capped, NeverExceedsTheCapFromTheFewestPartsOn) {
  Random random(3);
  for (int round = 0; round < 60; ++round) {
    const auto items = static_cast<std::size_t>(any_int(random, 1, 400));
    Doubles sizes = whole_numbers(random, items, 0, 1000);
    if (round % 3 == 0) {  // fractions, of which sums depend on the order
      std::ranges::transform(sizes, sizes.begin(), [](double size) { return size / 10 + 0.1; });
    }
    const Doubles costs = round % 2 == 0 ? work_of(sizes) : whole_numbers(random, items, 0, 99);
    const double cap = std::ranges::max(sizes) * (1 + static_cast<double>(any_int(random, 0, 8)));
    if (cap == 0) {
      continue;
    }
    for (const bool equal_count : {false, true}) {
      const std::int64_t fewest = fewest_parts({sizes, cap}, 1, equal_count);
      for (const std::int64_t more : {std::int64_t{0}, std::int64_t{1}, fewest / 3, fewest}) {
        (void)checked(balance(costs, fewest + more, {sizes, cap}, equal_count), costs, {sizes, cap},
                      static_cast<std::size_t>(fewest + more), equal_count);
      }
    }
  }
}

TEST(Capped, IsTheDivisionWithoutACapIfThatHoldsIt) {
  Random random(4);
  const Doubles sizes = whole_numbers(random, 300, 1, 100);
  const Doubles costs = work_of(sizes);
  for (const bool equal_count : {false, true}) {
    EXPECT_EQ(balance(costs, 7, {sizes, 1e6}, equal_count).indices,
              balance(costs, 7, equal_count).indices);
  }
}

TEST(Capped, TheFewestPartsAreAMultiple) {
  const Doubles sizes(10, 4.0);
  EXPECT_EQ(fewest_parts({sizes, 8.0}), 5);
  EXPECT_EQ(fewest_parts({sizes, 8.0}, 4), 8);
  EXPECT_EQ(fewest_parts({sizes, 100.0}, 3), 3);
  EXPECT_EQ(fewest_parts({{}, 1.0}, 2), 2) << "of nothing, too, so that ranks agree";
  const Batches division = balance(sizes, 12, {sizes, 8.0});
  EXPECT_EQ(std::ranges::count(division.loads, 0.0), 2) << "fewer items than parts";
}

TEST(Capped, ASearchFindsWhatPackingDoesNot) {
  // Best fit decreasing begins with 6 + 4 and 6 + 3, and needs 4 parts; 6 + 4, 6 + 2 + 2 and
  // 5 + 3 + 2 are three.
  const Doubles sizes{6, 6, 5, 4, 3, 2, 2, 2};
  const double cap = 10;
  ASSERT_TRUE(optimum(sizes, sizes, cap, 3, false));
  EXPECT_EQ(fewest_parts({sizes, cap}), 3);
  (void)checked(balance(sizes, 3, {sizes, cap}), sizes, {sizes, cap}, 3, false);
}

TEST(Capped, AnItemMayFillAPartByItself) {
  const Doubles sizes{0.3, 0.1, 0.2, 0.1};  // 0.1 + 0.2 is more than 0.3 in double precision
  const Batches division = balance(sizes, 3, {sizes, 0.3});
  (void)checked(division, sizes, {sizes, 0.3}, 3, false);
}

TEST(Capped, WrongArgumentsAreNamed) {
  const Doubles two{1.0, 2.0};
  const Doubles one{1.0};
  const Doubles wrong{1.0, -1.0};
  EXPECT_EQ(refusal(two, 2, {one, 5.0}), "sizes must be as many as costs, 2, got 1");
  EXPECT_EQ(refusal(two, 2, {wrong, 5.0}),
            "sizes must be finite and not negative, got -1 at index 1");
  EXPECT_EQ(refusal(two, 2, {two, 0.0}), "cap must be positive and finite, got 0");
  EXPECT_EQ(refusal(two, 2, {two, 1.5}),
            "item 1 exceeds the cap by itself: its size is 2, cap is 1.5");
  const Doubles sizes(6, 5.0);
  EXPECT_EQ(refusal(sizes, 2, {sizes, 10.0}),
            "no division of 6 items into parts=2 under cap=10 was found: 3 parts hold them, and "
            "fewer than 3 cannot");
  EXPECT_THROW((void)fewest_parts({two, 5.0}, 0), std::invalid_argument);
}

}  // namespace
}  // namespace brim::batching
