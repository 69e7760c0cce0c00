// PolynomialRegression: exact relations over nine decades, the inverse against a search, wrong
// input.

#include <brim/predict/polynomial_regression.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "tensors.h"

namespace brim {
namespace {

using tests::message_of;
using Polynomial = std::function<double(double)>;

PolynomialRegression through(std::int64_t degree, const std::vector<double>& x,
                             const Polynomial& f) {
  std::vector<double> y;
  y.reserve(x.size());
  for (const double value : x) {
    y.push_back(f(value));
  }
  PolynomialRegression model(degree);
  model.fit(x, y);
  return model;
}

TEST(PolynomialRegression, CubicIsExactFromOneToABillion) {
  const Polynomial f = [](double s) { return 5 + 3 * s + 2e-3 * s * s + 7e-9 * s * s * s; };
  const PolynomialRegression model = through(3, {1, 10, 1e3, 1e5, 1e6, 1e7, 1e8, 2e8, 5e8, 1e9}, f);
  for (const double s : {3e7, 3e8, 9.9e8}) {
    EXPECT_NEAR(model.predict(s) / f(s), 1, 1e-11) << s;
  }
  for (const double s : {1.0, 1e3, 1e6}) {
    EXPECT_NEAR(model.predict(s) / f(1e9), f(s) / f(1e9), 1e-15) << s;
  }
  EXPECT_NEAR(model.predict(1e9) / f(1e9), 1, 1e-13);
}

TEST(PolynomialRegression, CoefficientsAreThoseOfTheUnscaledFeatures) {
  const PolynomialRegression model =
      through(2, {1, 2, 3, 4}, [](double s) { return 4 - 3 * s + 2 * s * s; });
  const std::vector<double> found = model.coefficients();
  ASSERT_EQ(found.size(), 3U);
  EXPECT_NEAR(found[0], 4, 1e-10);
  EXPECT_NEAR(found[1], -3, 1e-10);
  EXPECT_NEAR(found[2], 2, 1e-10);
}

TEST(PolynomialRegression, SeveralFeaturesHaveAllMonomials) {
  const auto f = [](double n, double l) {
    return 1 + 2 * n + 3 * l + 4 * n * n + 5 * n * l + 6 * l * l;
  };
  std::vector<double> x;
  std::vector<double> y;
  for (const double n : {1.0, 3.0, 9.0}) {
    for (const double l : {10.0, 100.0, 400.0}) {
      x.insert(x.end(), {n, l});
      y.push_back(f(n, l));
    }
  }
  PolynomialRegression model(2);
  model.fit(x, y, 2);
  EXPECT_EQ(model.features(), 2U);
  const std::vector<std::vector<int>> powers{{0, 0}, {1, 0}, {0, 1}, {2, 0}, {1, 1}, {0, 2}};
  ASSERT_EQ(model.exponents(), powers);
  for (std::size_t j = 0; j < 6; ++j) {
    EXPECT_NEAR(model.coefficients()[j], static_cast<double>(j + 1), 1e-6);
  }
  const std::vector<double> point{5, 50};
  EXPECT_NEAR(model.predict(point), f(5, 50), 1e-6);
}

TEST(PolynomialRegression, LeastSquaresOfALineIsTheTextbookOne) {
  const std::vector<double> x{1, 2, 3, 4};
  const std::vector<double> y{2, 3, 5, 4};
  PolynomialRegression model(1);
  model.fit(x, y);  // slope 0.8, through the means 2.5 and 3.5
  EXPECT_NEAR(model.predict(2.5), 3.5, 1e-12);
  EXPECT_NEAR(model.predict(3.5) - model.predict(2.5), 0.8, 1e-12);
}

TEST(PolynomialRegression, InverseIsExactAtTheBoundaryForIncreasingPolynomials) {
  std::mt19937 random(3);
  std::uniform_real_distribution<double> unit(0, 1);
  for (int round = 0; round < 300; ++round) {
    const double a = 1e6 * unit(random);
    const double b = 1 + 1e4 * unit(random);
    const double c = unit(random);
    const PolynomialRegression model =
        through(2, {1, 100, 10'000, 1e6}, [&](double s) { return a + b * s + c * s * s; });
    const double budget = a + b + std::pow(10.0, 12 * unit(random));
    const std::int64_t size = model.inverse(budget);
    ASSERT_GE(size, 1);
    ASSERT_LE(model.predict(static_cast<double>(size)), budget);
    ASSERT_GT(model.predict(static_cast<double>(size + 1)), budget);
  }
}

TEST(PolynomialRegression, InverseStopsAtTheFirstCrossingOfAnyPolynomial) {
  std::mt19937 random(4);
  std::uniform_real_distribution<double> value(-100, 100);
  int between = 0;
  for (int round = 0; round < 2000; ++round) {
    const std::vector<double> x{1, 11, 23, 37, 50};
    std::vector<double> y(x.size());
    for (double& v : y) {
      v = value(random);
    }
    PolynomialRegression model(4);
    model.fit(x, y);
    const double budget = value(random);
    std::int64_t expected = 0;
    while (expected < 50 && model.predict(static_cast<double>(expected + 1)) <= budget) {
      ++expected;
    }
    ASSERT_EQ(model.inverse(budget, 1, 50), expected);
    between += expected > 0 && expected < 50 ? 1 : 0;
  }
  EXPECT_GT(between, 500);
}

TEST(PolynomialRegression, InverseIsLowerMinusOneOrUpperAtTheEnds) {
  const PolynomialRegression model = through(1, {1, 2}, [](double s) { return 10 * s; });
  EXPECT_EQ(model.inverse(9.99), 0);
  EXPECT_EQ(model.inverse(10.01), 1) << "at 10 itself the last bit of the fit decides";
  EXPECT_EQ(model.inverse(49, 5), 4);
  EXPECT_EQ(model.inverse(1e6, 1, 77), 77);
  EXPECT_EQ(model.inverse(std::numeric_limits<double>::infinity()),
            PolynomialRegression::kLargestSize);
  const PolynomialRegression falling = through(1, {1, 2}, [](double s) { return -s; });
  EXPECT_EQ(falling.inverse(0), PolynomialRegression::kLargestSize);
}

TEST(PolynomialRegression, InverseSolvesOneFeatureOfSeveral) {
  std::vector<double> x;
  std::vector<double> y;
  for (const double n : {1.0, 2.0, 3.0}) {
    for (const double l : {10.0, 20.0, 30.0}) {
      x.insert(x.end(), {n, l});
      y.push_back(n * l + 0.5);
    }
  }
  PolynomialRegression model(2);
  model.fit(x, y, 2);
  const std::vector<double> point{0, 100};
  EXPECT_EQ(model.inverse(1001, point, 0), 10);
  const std::vector<double> other{7, 0};
  EXPECT_EQ(model.inverse(701, other, 1), 100);
}

TEST(PolynomialRegression, WrongInputNamesTheArgumentAndKeepsTheFit) {
  using Error = std::invalid_argument;
  for (const std::int64_t degree : {-1, 17}) {
    EXPECT_CONTAINS(message_of<Error>([&] { const PolynomialRegression model(degree); }),
                    "degree must be from 0 to 16, got " + std::to_string(degree));
  }
  PolynomialRegression model(2);
  const auto fit = [&](std::vector<double> x, std::vector<double> y, std::size_t features = 1) {
    return message_of<Error>([&] { model.fit(x, y, features); });
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_CONTAINS(message_of<Error>([&] { static_cast<void>(model.predict(1)); }), "fit first");
  model.fit(std::vector<double>{1, 2, 3}, std::vector<double>{1, 4, 9});
  EXPECT_CONTAINS(fit({1, 2, 3}, {1, 2}), "same length, got 3 point(s) and 2");
  EXPECT_CONTAINS(fit({1, 2}, {1, 2}), "needs at least 3");
  EXPECT_CONTAINS(fit({1, 2, 2, 2}, {1, 2, 2, 2}), "2 different point(s)");
  EXPECT_CONTAINS(fit({1, nan, 3}, {1, 2, 3}), "x must hold finite numbers, got nan at 1");
  EXPECT_CONTAINS(fit({1, 2, 3}, {1, 2, HUGE_VAL}), "y must hold finite numbers, got inf at 2");
  EXPECT_CONTAINS(fit({1, 5, 2, 5, 3, 5, 4, 5, 6, 5, 7, 5}, {1, 2, 3, 4, 5, 6}, 2),
                  "same value 5 at every point in feature 1");
  EXPECT_CONTAINS(fit({1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6}, {1, 2, 3, 4, 5, 6}, 2), "open");
  EXPECT_CONTAINS(fit(std::vector<double>(100), std::vector<double>(1), 100), "coefficients");
  EXPECT_NEAR(model.predict(4), 16, 1e-9) << "the earlier fit stays";
  EXPECT_CONTAINS(message_of<Error>([&] { static_cast<void>(model.inverse(nan)); }), "budget");
  EXPECT_CONTAINS(message_of<Error>([&] { static_cast<void>(model.inverse(1, 5, 4)); }), "lower");
  const std::vector<double> two{1, 2};
  EXPECT_CONTAINS(message_of<Error>([&] { static_cast<void>(model.predict(two)); }),
                  "1 feature(s) as in fit, got 2");
}

}  // namespace
}  // namespace brim
