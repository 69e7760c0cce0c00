#include <brim/batching/mixture.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <vector>

namespace brim::batching {
namespace {

std::vector<double> random_weights(std::mt19937& random, std::size_t count) {
  std::vector<double> weights(count);
  for (double& weight : weights) {
    weight = random() % 4 == 0 ? 0.0 : 1e-3 * static_cast<double>(1 + random() % 5000);
  }
  weights[random() % count] = 1;
  return weights;
}

TEST(Mixture, CountsFollowTheWeightsAtEverySample) {
  std::mt19937 random(1);
  for (int i = 0; i < 100; ++i) {
    const std::size_t count = 1 + random() % 12;
    const std::vector<double> weights = random_weights(random, count);
    const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
    Mixture mixture(weights, random());
    std::vector<double> taken(count);
    for (int n = 1; n <= 500; ++n) {
      const std::size_t source = mixture.next().value();
      mixture.took(source);
      taken[source] += 1;
      for (std::size_t s = 0; s < count; ++s) {
        ASSERT_LE(std::abs(taken[s] - n * weights[s] / total), static_cast<double>(count));
      }
      ASSERT_GT(weights[source], 0);
    }
    EXPECT_EQ(mixture.taken(), 500);
  }
}

TEST(Mixture, SizesFollowTheWeights) {
  std::mt19937 random(2);
  const std::vector<double> weights{5, 3, 2};
  Mixture mixture(weights, 0);
  std::vector<double> taken(3);
  for (int n = 0; n < 20'000; ++n) {
    const std::size_t source = mixture.next().value();
    const auto size = static_cast<double>(1 + random() % (source == 2 ? 1000 : 10));
    mixture.took(source, size);
    taken[source] += size;
  }
  const double total = taken[0] + taken[1] + taken[2];
  for (std::size_t s = 0; s < 3; ++s) {
    EXPECT_LE(std::abs(taken[s] - total * weights[s] / 10), 3 * 1000);
  }
}

TEST(Mixture, ChangedWeightsHoldFromTheNextSampleOnAndNothingIsMadeUpFor) {
  Mixture mixture({1, 0}, 3);
  for (int n = 0; n < 1000; ++n) {
    EXPECT_EQ(mixture.next(), 0U);
    mixture.took(0);
  }
  mixture.set_weights({1, 1});
  int second = 0;
  for (int n = 0; n < 100; ++n) {
    const std::size_t source = mixture.next().value();
    second += source == 1 ? 1 : 0;
    mixture.took(source);
  }
  EXPECT_EQ(second, 50);
  const std::vector<Mixture::Change> changes{{0, {1, 0}}, {1000, {1, 1}}};
  EXPECT_EQ(mixture.changes(), changes);
}

TEST(Mixture, TheSameChangesGiveTheSameChoicesAndAnotherSeedOthers) {
  const auto choices = [](std::uint64_t seed) {
    Mixture mixture({3, 1, 2}, seed);
    std::vector<std::size_t> chosen;
    for (int n = 0; n < 60; ++n) {
      if (n == 20) {
        mixture.set_weights({1, 1, 0.5});
      }
      chosen.push_back(mixture.next().value());
      mixture.took(chosen.back());
    }
    return chosen;
  };
  EXPECT_EQ(choices(7), choices(7));
  std::set<std::vector<std::size_t>> different;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    different.insert(choices(seed));
  }
  EXPECT_GT(different.size(), 5U);
}

TEST(Mixture, WithoutADroppedSourceTheOthersKeepTheirProportion) {
  Mixture mixture({1, 3, 96}, 0);
  mixture.drop(2);
  std::vector<int> taken(3);
  for (int n = 0; n < 400; ++n) {
    const std::size_t source = mixture.next().value();
    ++taken[source];
    mixture.took(source);
  }
  EXPECT_NEAR(taken[0], 100, 3);
  EXPECT_EQ(taken[2], 0);
  mixture.drop(0);
  mixture.drop(1);
  EXPECT_EQ(mixture.next(), std::nullopt);
}

TEST(Mixture, WrongNumbersAreErrors) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  for (const std::vector<double>& weights :
       {std::vector<double>{}, {0, 0}, {1, -1}, {1, kNan}, {1, 1 / 0.0}}) {
    EXPECT_THROW(Mixture(weights, 0), std::invalid_argument);
  }
  Mixture mixture({1, 2}, 0);
  EXPECT_THROW(mixture.set_weights({1}), std::invalid_argument);
  EXPECT_THROW(mixture.took(0, kNan), std::invalid_argument);
}

}  // namespace
}  // namespace brim::batching
