#include "batching/permutation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <set>
#include <span>
#include <vector>

namespace brim::batching::detail {
namespace {

using Ints = std::vector<std::int64_t>;

Ints read(const Permutation& permutation, std::uint64_t first, std::uint64_t count) {
  Ints numbers(count);
  permutation.read(first, std::span(numbers));
  return numbers;
}

Ints read(std::uint64_t n, std::uint64_t seed) { return read(Permutation(n, seed), 0, n); }

bool is_bijection(const Ints& numbers) {
  std::vector<bool> seen(numbers.size(), false);
  for (const std::int64_t number : numbers) {
    if (number < 0 || number >= std::ssize(numbers) || seen[static_cast<std::size_t>(number)]) {
      return false;
    }
    seen[static_cast<std::size_t>(number)] = true;
  }
  return true;
}

TEST(Permutation, HasEachNumberOnceForEverySmallN) {
  for (std::uint64_t n = 0; n <= 3000; ++n) {
    ASSERT_TRUE(is_bijection(read(n, n * 7))) << n;
  }
}

TEST(Permutation, HasEachNumberOnceAroundSquaresAndForLargeN) {
  for (const std::uint64_t root : {64U, 100U, 255U, 256U, 1000U}) {
    for (const std::int64_t offset : {-1, 0, 1}) {
      const auto square = static_cast<std::int64_t>(root * root);
      const auto n = static_cast<std::uint64_t>(square + offset);
      ASSERT_TRUE(is_bijection(read(n, 3))) << n;
      const auto oblong =
          static_cast<std::uint64_t>(square + static_cast<std::int64_t>(root) + offset);
      ASSERT_TRUE(is_bijection(read(oblong, 3))) << oblong;
    }
  }
}

TEST(Permutation, PiecesFromAnyPlaceAreTheWhole) {
  for (const std::uint64_t n : {1U, 10U, 1023U, 1024U, 1025U, 5000U, 100'003U}) {
    const Permutation permutation(n, 5);
    EXPECT_EQ(permutation.size(), n);
    const Ints whole = read(permutation, 0, n);
    for (std::uint64_t first = 0, step = 1; first < n; first += step, step = step * 3 % 1009) {
      const std::uint64_t count = std::min(n - first, step);
      ASSERT_EQ(read(permutation, first, count),
                Ints(whole.begin() + static_cast<std::ptrdiff_t>(first),
                     whole.begin() + static_cast<std::ptrdiff_t>(first + count)));
    }
    EXPECT_TRUE(read(permutation, n, 0).empty());
  }
}

TEST(Permutation, IndicesOf32BitsAreTheSame) {
  for (const std::uint64_t n : {500U, 5000U}) {
    std::vector<std::uint32_t> narrow(n);
    Permutation(n, 6).read(0, std::span(narrow));
    EXPECT_EQ(Ints(narrow.begin(), narrow.end()), read(n, 6));
  }
}

TEST(Permutation, SeedsGiveOrdersThatShareNoMoreThanChance) {
  for (const std::uint64_t n : {1000U, 2000U, 100'000U}) {
    const Ints first = read(n, 0);
    for (std::uint64_t seed = 1; seed < 20; ++seed) {
      const Ints other = read(n, seed);
      std::int64_t same = 0;
      for (std::size_t i = 0; i < other.size(); ++i) {
        same += static_cast<std::int64_t>(other[i] == first[i]);
      }
      EXPECT_LE(same, 12) << "seed " << seed << " of " << n;  // 1 is expected
    }
  }
}

TEST(Permutation, EveryOrderOfAFewOccursAsOften) {
  std::vector<int> counts(256);
  for (std::uint64_t seed = 0; seed < 24'000; ++seed) {
    const Ints order = read(4, seed);
    ++counts[static_cast<std::size_t>(order[0] + 4 * order[1] + 16 * order[2] + 64 * order[3])];
  }
  EXPECT_EQ(std::count_if(counts.begin(), counts.end(), [](int count) { return count > 0; }), 24);
  for (const int count : counts) {
    if (count > 0) {
      EXPECT_NEAR(count, 1000, 160);  // five standard deviations
    }
  }
}

/// Σ (count - expected)² / expected over cells, less the degrees of freedom, in standard
/// deviations.
double excess_of_chi_square(const std::vector<int>& counts, double expected) {
  double sum = 0.0;
  for (const int count : counts) {
    sum += (count - expected) * (count - expected) / expected;
  }
  const auto freedom = static_cast<double>(counts.size() - 1);
  return (sum - freedom) / std::sqrt(2 * freedom);
}

TEST(Permutation, PlacesAndNumbersAreUnrelated) {
  // Where the k-th sixteenth of the places goes to, over many seeds, and which number follows.
  for (const std::uint64_t n : {1600U, 16'000U}) {
    std::vector<int> goes_to(256);
    std::vector<int> steps(16);
    for (std::uint64_t seed = 0; seed < 50; ++seed) {
      const Ints order = read(n, seed);
      for (std::size_t i = 0; i < order.size(); ++i) {
        const auto number = static_cast<std::size_t>(order[i]);
        ++goes_to[i * 16 / n * 16 + number * 16 / n];
        const std::size_t next = static_cast<std::size_t>(order[(i + 1) % n]);
        ++steps[(next + n - number) % n * 16 / n];
      }
    }
    const double all = 50.0 * static_cast<double>(n);
    EXPECT_LT(excess_of_chi_square(goes_to, all / 256), 6.0) << n;
    EXPECT_LT(excess_of_chi_square(steps, all / 16), 6.0) << n;
  }
}

TEST(Mix, GivesDifferentNumbersForSeedsAndStreams) {
  std::set<std::uint64_t> seen;
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    for (std::uint64_t stream = 0; stream < 100; ++stream) {
      seen.insert(mix(seed, stream));
    }
  }
  EXPECT_EQ(seen.size(), 10'000U);
}

TEST(Below, IsBelowAndReachesBothEnds) {
  constexpr std::uint64_t kAll = ~std::uint64_t{0};
  for (const std::uint64_t n : {std::uint64_t{1}, std::uint64_t{7}, std::uint64_t{1} << 32}) {
    EXPECT_EQ(below(0, n), 0U);
    EXPECT_EQ(below(kAll, n), n - 1);
  }
}

}  // namespace
}  // namespace brim::batching::detail
