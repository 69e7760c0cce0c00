// The bound on programs whose need is known: never below it, exact at measurements, and how near.

#include <brim/predict/need_bound.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <utility>
#include <vector>

namespace brim {
namespace {

NeedBound::Terms terms_of(double n, double length) {
  return {1, n * length, n * length * length, n, length, length * length};
}

/// A random maximum of up to four phases of any terms.
class Program {
 public:
  explicit Program(std::mt19937& random) {
    std::uniform_real_distribution<double> unit(0, 1);
    constexpr std::array<double, 6> kTypical{1e6, 1e3, 10, 1e4, 1e3, 10};
    phases_.resize(1 + static_cast<std::size_t>(4 * unit(random)));
    for (auto& phase : phases_) {
      for (std::size_t j = 0; j < kTypical.size(); ++j) {
        phase[j] = unit(random) < 0.5 ? 0 : kTypical[j] * std::pow(10, 2 * unit(random) - 1);
      }
    }
  }

  [[nodiscard]] double need(double n, double length) const {
    const NeedBound::Terms terms = terms_of(n, length);
    double most = 1e5;
    for (const auto& phase : phases_) {
      double bytes = 0;
      for (std::size_t j = 0; j < phase.size(); ++j) {
        bytes += phase[j] * terms[j];
      }
      most = std::max(most, bytes);
    }
    return most;
  }

 private:
  std::vector<std::array<double, 6>> phases_;
};

TEST(NeedBound, IsNeverBelowTheNeedOfAnyMaximumOfPhases) {
  std::mt19937 random(1);
  std::uniform_real_distribution<double> unit(0, 1);
  const auto shape = [&] {
    return std::array{std::floor(std::pow(1000, unit(random))),
                      std::floor(8 * std::pow(64, unit(random)))};
  };
  for (int round = 0; round < 500; ++round) {
    const Program program(random);
    NeedBound bound;
    const int count = 1 + static_cast<int>(20 * unit(random));
    for (int i = 0; i < count; ++i) {
      const auto [n, length] = shape();
      bound.add(terms_of(n, length), program.need(n, length));
      ASSERT_NEAR(bound.at(terms_of(n, length)) / program.need(n, length), 1, 1e-9);
    }
    for (int i = 0; i < 40; ++i) {
      const auto [n, length] = shape();
      ASSERT_GE(bound.at(terms_of(n, length)), program.need(n, length) * (1 - 1e-9));
      ASSERT_LE(bound.at(terms_of(n, length)), bound.at(terms_of(n + 1, length)) * (1 + 1e-9));
      ASSERT_LE(bound.at(terms_of(n, length)), bound.at(terms_of(n, length + 1)) * (1 + 1e-9));
    }
  }
}

TEST(NeedBound, IsNearTheNeedBetweenMeasurementsNearTheBudget) {
  const auto need = [](double n, double length) { return 1e6 + 900 * n * length; };
  NeedBound bound;
  for (const double length : {8, 512}) {
    const double n = std::floor(1e8 / (900 * length));
    bound.add(terms_of(n, length), need(n, length));
  }
  for (double length = 8; length <= 512; length *= 1.3) {
    const double n = std::floor(1e8 / (900 * length));
    EXPECT_LT(bound.at(terms_of(n, length)), 1.02 * need(n, length)) << length;
  }
}

TEST(NeedBound, ATermThatNoMeasurementHadHasNoBound) {
  NeedBound bound;
  EXPECT_EQ(bound.at({1}), std::numeric_limits<double>::infinity());
  EXPECT_EQ(bound.at({}), 0);
  bound.add({1, 2}, 10);
  EXPECT_DOUBLE_EQ(bound.at({1, 2}), 10);
  EXPECT_DOUBLE_EQ(bound.at({1, 6}), 30);
  EXPECT_DOUBLE_EQ(bound.at({0, 1}), 5);
  EXPECT_EQ(bound.at({1, 2, 1}), std::numeric_limits<double>::infinity());
}

}  // namespace
}  // namespace brim
