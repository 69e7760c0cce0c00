// The solvers by themselves: against what must hold at a minimum, on random systems.

#include "predict/least_squares.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace brim::detail {
namespace {

Matrix random_matrix(std::mt19937& random, std::size_t rows, std::size_t columns) {
  std::normal_distribution<double> normal;
  Matrix a(rows, columns);
  for (double& value : a.values) {
    value = normal(random);
  }
  return a;
}

std::vector<double> times(const Matrix& a, const std::vector<double>& x) {
  std::vector<double> result(a.rows);
  for (std::size_t i = 0; i < a.rows; ++i) {
    for (std::size_t j = 0; j < a.columns; ++j) {
      result[i] += a.at(i, j) * x[j];
    }
  }
  return result;
}

/// What is left of b, along each column.
std::vector<double> gradient(const Matrix& a, const std::vector<double>& b,
                             const std::vector<double>& x) {
  const std::vector<double> image = times(a, x);
  std::vector<double> result(a.columns);
  for (std::size_t i = 0; i < a.rows; ++i) {
    for (std::size_t j = 0; j < a.columns; ++j) {
      result[j] += a.at(i, j) * (b[i] - image[i]);
    }
  }
  return result;
}

TEST(LeastSquares, ResidualIsOrthogonalToEveryColumn) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    const std::size_t columns = 1 + random() % 6;
    const Matrix a = random_matrix(random, columns + random() % 8, columns);
    const Matrix b = random_matrix(random, a.rows, 1);
    const LeastSquares solved = solve_least_squares(a, b.values);
    ASSERT_EQ(solved.rank, columns);
    for (const double value : gradient(a, b.values, solved.x)) {
      ASSERT_NEAR(value, 0, 1e-10);
    }
  }
}

TEST(LeastSquares, ColumnsOfVeryDifferentUnitsAreSolvedExactly) {
  Matrix a(4, 3);
  for (std::size_t i = 0; i < 4; ++i) {
    const double s = std::pow(10.0, 3.0 * static_cast<double>(i));
    a.at(i, 0) = 1;
    a.at(i, 1) = s;
    a.at(i, 2) = s * s;
  }
  const std::vector<double> x{7, 3, 2};
  const LeastSquares solved = solve_least_squares(a, times(a, x));
  EXPECT_EQ(solved.rank, 3U);
  EXPECT_NEAR(solved.x[2], 2, 1e-12);
}

TEST(LeastSquares, DependentColumnsLowerTheRankAndGetZero) {
  Matrix a(3, 2);
  for (std::size_t i = 0; i < 3; ++i) {
    a.at(i, 0) = static_cast<double>(i + 1);
    a.at(i, 1) = 2 * a.at(i, 0);
  }
  const LeastSquares solved = solve_least_squares(a, {1, 2, 3});
  EXPECT_EQ(solved.rank, 1U);
  const std::vector<double> image = times(a, solved.x);
  EXPECT_NEAR(image[2], 3, 1e-12);
  EXPECT_EQ(solve_least_squares(Matrix(2, 1), {1, 2}).rank, 0U);
}

TEST(NonNegative, MeetsTheConditionsOfAMinimum) {
  std::mt19937 random(2);
  int at_bound = 0;
  for (int round = 0; round < 500; ++round) {
    const std::size_t columns = 1 + random() % 6;
    const Matrix a = random_matrix(random, columns + random() % 8, columns);
    const Matrix b = random_matrix(random, a.rows, 1);
    const std::vector<double> x = solve_non_negative(a, b.values);
    const std::vector<double> gain = gradient(a, b.values, x);
    for (std::size_t j = 0; j < columns; ++j) {
      ASSERT_GE(x[j], 0);
      ASSERT_LE(gain[j], 1e-9) << "a larger x would be better";
      if (x[j] > 0) {
        ASSERT_NEAR(gain[j], 0, 1e-9) << "another x would be better";
      } else {
        ++at_bound;
      }
    }
  }
  EXPECT_GT(at_bound, 100) << "the bound was tried";
}

TEST(NonNegative, DependentColumnsDoNoHarm) {
  Matrix a(3, 3);
  for (std::size_t i = 0; i < 3; ++i) {
    a.at(i, 0) = 1;
    a.at(i, 1) = static_cast<double>(i + 1);
    a.at(i, 2) = 64 * a.at(i, 1);
  }
  const std::vector<double> b{3, 5, 7};  // 1 + 2 s
  const std::vector<double> image = times(a, solve_non_negative(a, b));
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_NEAR(image[i], b[i], 1e-9);
  }
}

}  // namespace
}  // namespace brim::detail
