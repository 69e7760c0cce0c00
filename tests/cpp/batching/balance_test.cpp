#include <brim/batching/balance.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <iterator>
#include <limits>
#include <numeric>
#include <set>
#include <stdexcept>
#include <vector>

#include "batching/reference.h"

namespace brim::batching {
namespace {

using namespace reference;

double largest(const Doubles& loads) { return *std::max_element(loads.begin(), loads.end()); }

Doubles descending(Doubles costs) {
  std::sort(costs.begin(), costs.end(), std::greater<>());
  return costs;
}

/// The number of items that each part may have; those that exceed the floor are `n % parts` at
/// most.
struct Room {
  Room(std::size_t items, std::size_t parts, bool equal_count)
      : floor(equal_count ? items / parts : items), more(equal_count ? items % parts : 0) {}
  [[nodiscard]] bool has(std::size_t count) const {
    return count < floor || (count == floor && more > 0);
  }
  void take(std::size_t count) { more -= count == floor ? 1 : 0; }
  std::size_t floor;
  std::size_t more;
};

/// The costliest item first, to the part that costs least.
double greedy(const Doubles& costs, std::size_t parts, bool equal_count) {
  Doubles loads(parts);
  std::vector<std::size_t> counts(parts);
  Room room(costs.size(), parts, equal_count);
  for (const double cost : descending(costs)) {
    std::size_t chosen = parts;
    for (std::size_t p = 0; p < parts; ++p) {
      if (room.has(counts[p]) && (chosen == parts || loads[p] < loads[chosen])) {
        chosen = p;
      }
    }
    room.take(counts[chosen]++);
    loads[chosen] += cost;
  }
  return largest(loads);
}

/// Largest differencing with all parts of every division, by a search through all of them, the
/// latest first.
double differencing(const Doubles& costs, std::size_t parts, bool equal_count) {
  const std::size_t together = equal_count ? parts : 1;
  const Doubles sorted = descending(costs);
  std::vector<Doubles> divisions;
  for (std::size_t begin = 0; begin < sorted.size(); begin += together) {
    Doubles division(
        sorted.begin() + static_cast<std::ptrdiff_t>(begin),
        sorted.begin() + static_cast<std::ptrdiff_t>(std::min(begin + together, sorted.size())));
    division.resize(parts);
    divisions.push_back(division);
  }
  const auto take = [&] {
    const auto found = std::max_element(divisions.rbegin(), divisions.rend(),
                                        [](const Doubles& a, const Doubles& b) {
                                          return a.front() - a.back() < b.front() - b.back();
                                        });
    Doubles division = *found;
    divisions.erase(std::next(found).base());
    return division;
  };
  while (divisions.size() > 1) {
    Doubles a = take();
    const Doubles b = take();
    for (std::size_t p = 0; p < parts; ++p) {
      a[p] += b[parts - 1 - p];
    }
    divisions.push_back(descending(a));
  }
  return divisions.front().front();
}

/// The least possible largest load, by trying all divisions.
double optimum(const Doubles& costs, std::size_t parts, bool equal_count) {
  double best = std::numeric_limits<double>::infinity();
  Doubles loads(parts);
  std::vector<std::size_t> counts(parts);
  const std::function<void(std::size_t, Room)> place = [&](std::size_t item, Room room) {
    if (item == costs.size()) {
      best = std::min(best, largest(loads));
      return;
    }
    std::set<std::pair<double, std::size_t>> tried;
    for (std::size_t p = 0; p < parts; ++p) {
      if (room.has(counts[p]) && tried.insert({loads[p], counts[p]}).second) {
        Room left = room;
        left.take(counts[p]++);
        const double before = loads[p];
        loads[p] += costs[item];
        place(item + 1, left);
        loads[p] = before;
        --counts[p];
      }
    }
  };
  place(0, Room(costs.size(), parts, equal_count));
  return best;
}

/// All items once, loads as they say; returns the largest.
double checked(const Batches& division, const Doubles& costs, std::size_t parts, bool equal_count) {
  EXPECT_EQ(division.count(), parts);
  std::vector<std::int64_t> seen;
  std::size_t least = costs.size();
  std::size_t most = 0;
  for (std::size_t p = 0; p < division.count(); ++p) {
    const auto part = division[p];
    EXPECT_TRUE(std::is_sorted(part.begin(), part.end()));
    double load = 0.0;
    for (const std::int64_t item : part) {
      load += costs[static_cast<std::size_t>(item)];
    }
    EXPECT_DOUBLE_EQ(load, division.loads[p]);
    seen.insert(seen.end(), part.begin(), part.end());
    least = std::min(least, part.size());
    most = std::max(most, part.size());
  }
  std::sort(seen.begin(), seen.end());
  std::vector<std::int64_t> all(costs.size());
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(seen, all);
  if (equal_count) {
    EXPECT_LE(most - least, 1U);
  }
  return largest(division.loads);
}

Doubles random_costs(Random& random, std::size_t count) {
  Doubles costs(count);
  for (double& cost : costs) {
    cost = std::exp(static_cast<double>(any_int(random, 0, 1 << 30)) / (1 << 28));
  }
  return costs;
}

TEST(Balance, IsWithinTheKnownBoundsOfTheOptimum) {
  Random random(1);
  int better_than_greedy = 0;
  for (int round = 0; round < 300; ++round) {
    const auto items = static_cast<std::size_t>(any_int(random, 1, 9));
    const auto parts = static_cast<std::size_t>(any_int(random, 1, 4));
    Doubles costs(items);
    for (double& cost : costs) {
      cost = static_cast<double>(any_int(random, 0, 30));
    }
    for (const bool equal_count : {false, true}) {
      const double found = checked(balance(costs, static_cast<std::int64_t>(parts), equal_count),
                                   costs, parts, equal_count);
      const double best = optimum(costs, parts, equal_count);
      const double bound = equal_count ? 2.0 : 4.0 / 3 - 1.0 / (3.0 * static_cast<double>(parts));
      EXPECT_GE(found, best);
      EXPECT_LE(found, best * bound + 1e-9);
      EXPECT_LE(found, greedy(costs, parts, equal_count));
      better_than_greedy += found < greedy(costs, parts, equal_count) ? 1 : 0;
    }
  }
  EXPECT_GT(better_than_greedy, 10);
}

TEST(Balance, IsNoWorseThanTheBetterOfGreedyAndDifferencing) {
  Random random(2);
  for (int round = 0; round < 150; ++round) {
    const auto parts = static_cast<std::size_t>(any_int(random, 2, round % 10 == 0 ? 70 : 9));
    const auto items = static_cast<std::size_t>(any_int(random, 1, 300));
    const Doubles costs = random_costs(random, items);
    for (const bool equal_count : {false, true}) {
      const double found = checked(balance(costs, static_cast<std::int64_t>(parts), equal_count),
                                   costs, parts, equal_count);
      EXPECT_LE(found, greedy(costs, parts, equal_count) * (1 + 1e-9));
      EXPECT_LE(found, differencing(costs, parts, equal_count) * (1 + 1e-9));
    }
  }
}

TEST(Balance, OfEqualDifferencesTheLatestIsMergedFirst) {
  Random random(5);
  for (int round = 0; round < 2000; ++round) {
    Doubles costs(static_cast<std::size_t>(any_int(random, 5, 30)));
    for (double& cost : costs) {
      cost = static_cast<double>(any_int(random, 0, 10));
    }
    const auto parts = static_cast<std::size_t>(any_int(random, 2, 8));
    for (const bool equal_count : {false, true}) {
      const Batches division = balance(costs, static_cast<std::int64_t>(parts), equal_count);
      EXPECT_LE(largest(division.loads), differencing(costs, parts, equal_count));
    }
  }
}

// From 65536 items on, some are divided anew before all are.
TEST(Balance, OfManyWholeCostsIsPerfect) {
  Random random(3);
  Doubles costs(70'000);
  for (double& cost : costs) {
    cost = static_cast<double>(any_int(random, 30, 2000));
  }
  for (const std::size_t parts : {2U, 7U, 64U}) {
    const double mean =
        std::accumulate(costs.begin(), costs.end(), 0.0) / static_cast<double>(parts);
    for (const bool equal_count : {false, true}) {
      const double found = checked(balance(costs, static_cast<std::int64_t>(parts), equal_count),
                                   costs, parts, equal_count);
      EXPECT_EQ(found, std::ceil(mean)) << parts << " parts, equal counts: " << equal_count;
    }
  }
}

TEST(Balance, OfManyCostsOfAllMagnitudesIsPerfect) {
  Random random(6);
  Doubles costs(69'631);  // so that one item more in a part changes which of its items are chosen
  for (double& cost : costs) {  // the last ones, which are nearly equal, cannot even out the first
    cost = std::pow(static_cast<double>(any_int(random, 1, 1 << 20)) / (1 << 20), -0.7);
  }
  for (const bool equal_count : {false, true}) {
    const double mean = std::accumulate(costs.begin(), costs.end(), 0.0) / 2;
    EXPECT_NEAR(checked(balance(costs, 2, equal_count), costs, 2, equal_count) / mean, 1.0, 1e-9);
  }
}

TEST(Balance, OfEqualCostsNeedsNoDifferencing) {
  // The bound of a part that has one item more than others is met, and not only the mean.
  for (const bool equal_count : {false, true}) {
    EXPECT_EQ(largest(balance(Doubles(1001, 0.1), 10, equal_count).loads),
              largest(balance(Doubles(101, 0.1), 1, equal_count).loads));
  }
}

TEST(Balance, LastItemsThatCannotEvenOutAreNoExcuse) {
  // Differencing of the last items, which cost nothing, would leave what the greedy method made.
  Random random(4);
  Doubles costs = random_costs(random, 200);
  const double expected = differencing(costs, 7, false);
  ASSERT_LT(expected, greedy(costs, 7, false));
  costs.resize(70'000);
  EXPECT_LE(checked(balance(costs, 7), costs, 7, false), expected * (1 + 1e-9));
}

TEST(Balance, OneCostlyItemIsAlone) {
  Doubles costs(10'000, 1.0);
  costs[5] = 1e6;
  const Batches division = balance(costs, 4);
  EXPECT_EQ(checked(division, costs, 4, false), 1e6);
}

TEST(Balance, ItemsThatCostNothingAreSpread) {
  const Batches division = balance(Doubles(12), 4);
  for (std::size_t p = 0; p < 4; ++p) {
    EXPECT_EQ(division[p].size(), 3U);
  }
}

TEST(Balance, PartsMayBeEmpty) {
  EXPECT_EQ(balance({}, 3).count(), 3U);
  const Doubles costs{2.0};
  EXPECT_EQ(checked(balance(costs, 3, true), costs, 3, true), 2.0);
  const Batches division = balance(Doubles{1.0, 2.0}, 1000);
  EXPECT_EQ(division.count(), 1000U);
  EXPECT_EQ(division[0].size() + division[1].size(), 2U) << "those beyond the items are empty";
}

TEST(Balance, WrongArgumentsAreNamed) {
  const auto message = [](const Doubles& costs, std::int64_t parts) -> std::string {
    try {
      (void)balance(costs, parts);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "none";
  };
  EXPECT_EQ(message({1.0}, 0), "parts must be from 1 to 2^24, got 0");
  EXPECT_EQ(message({1.0, -2.0}, 2), "costs must be finite and not negative, got -2 at index 1");
  EXPECT_EQ(message({std::nan("")}, 2),
            "costs must be finite and not negative, got nan at index 0");
}

TEST(Flops, GrowWithTheSquareOfTheLength) {
  EXPECT_EQ(flops(10), 10 * 24576 + 100);
  EXPECT_EQ(flops(3, 2, 5), 2 * 3 + 5 * 9);
}

}  // namespace
}  // namespace brim::batching
