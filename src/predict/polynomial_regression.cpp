#include <brim/predict/polynomial_regression.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <utility>

#include "bisect.h"
#include "check_argument.h"
#include "predict/least_squares.h"

namespace brim {
namespace {

using detail::check_argument;

constexpr std::size_t kMostCoefficients = 2000;

/// All powers of `features` features whose sum is at most `degree`, by sum and then by the first
/// feature's.
std::vector<std::vector<int>> monomials(std::size_t features, int degree) {
  std::vector<std::vector<int>> result;
  std::vector<int> powers(features);
  const auto extend = [&](const auto& self, std::size_t feature, int left) -> void {
    if (feature + 1 == features) {
      powers[feature] = left;
      result.push_back(powers);
      return;
    }
    for (int power = left; power >= 0; --power) {
      powers[feature] = power;
      self(self, feature + 1, left - power);
    }
  };
  for (int total = 0; total <= degree; ++total) {
    extend(extend, 0, total);
  }
  return result;
}

std::size_t count_monomials(std::size_t features, std::int64_t degree) {
  double count = 1;  // (features + degree) over degree
  for (std::int64_t i = 1; i <= degree; ++i) {
    count *= (static_cast<double>(features) + static_cast<double>(i)) / static_cast<double>(i);
  }
  return count > 1e9 ? std::size_t{1'000'000'000} : static_cast<std::size_t>(std::lround(count));
}

double horner(std::span<const double> coefficients, double x) {
  double result = 0;
  for (std::size_t i = coefficients.size(); i-- > 0;) {
    result = result * x + coefficients[i];
  }
  return result;
}

std::vector<double> derivative(std::span<const double> coefficients) {
  std::vector<double> result;
  result.reserve(coefficients.size());
  for (std::size_t i = 1; i < coefficients.size(); ++i) {
    result.push_back(static_cast<double>(i) * coefficients[i]);
  }
  return result;
}

/// Where a polynomial changes its sign between `low` and `high`, ascending: between neighbouring
/// zeros of its derivative it is monotone, so halving finds each.
std::vector<double> zeros(std::span<const double> coefficients, double low, double high) {
  if (coefficients.size() <= 1) {
    return {};
  }
  std::vector<double> ends = zeros(derivative(coefficients), low, high);
  ends.insert(ends.begin(), low);
  ends.push_back(high);
  std::vector<double> result;
  for (std::size_t i = 0; i + 1 < ends.size(); ++i) {
    double left = ends[i];
    double right = ends[i + 1];
    const bool rises = horner(coefficients, left) <= 0;
    if (rises == (horner(coefficients, right) <= 0)) {
      continue;
    }
    for (int step = 0; step < 200; ++step) {
      const double middle = left + (right - left) / 2;
      if (middle <= left || middle >= right) {
        break;
      }
      ((horner(coefficients, middle) <= 0) == rises ? left : right) = middle;
    }
    result.push_back(left);
  }
  return result;
}

void check_finite(const char* name, std::span<const double> values) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    check_argument(std::isfinite(values[i]), name, " must hold finite numbers, got ", values[i],
                   " at ", i);
  }
}

std::size_t count_different(std::span<const double> x, std::size_t features) {
  std::set<std::vector<double>> seen;
  for (std::size_t i = 0; i < x.size(); i += features) {
    const auto point = x.subspan(i, features);
    seen.emplace(point.begin(), point.end());
  }
  return seen.size();
}

void check_shape(std::span<const double> x, std::span<const double> y, std::size_t features) {
  check_argument(features > 0, "features must be 1 or more, got 0");
  check_argument(x.size() == y.size() * features, "x and y must have the same length, got ",
                 x.size() / features, " point(s) and ", y.size(), " value(s)");
  check_finite("x", x);
  check_finite("y", y);
}

}  // namespace

PolynomialRegression::PolynomialRegression(std::int64_t degree) : degree_(degree) {
  check_argument(degree >= 0 && degree <= kLargestDegree, "degree must be from 0 to ",
                 kLargestDegree, ", got ", degree);
}

void PolynomialRegression::fit(std::span<const double> x, std::span<const double> y,
                               std::size_t features) {
  check_shape(x, y, features);
  const std::size_t count = count_monomials(features, degree_);
  check_argument(count <= kMostCoefficients, "degree ", degree_, " with ", features,
                 " features has ", count, " coefficients: at most ", kMostCoefficients,
                 " are allowed");
  const std::size_t different = count_different(x, features);
  check_argument(different >= count, "x has ", different, " different point(s): degree ", degree_,
                 " with ", features, " feature(s) needs at least ", count);
  PolynomialRegression next(degree_);
  for (std::size_t f = 0; f < features; ++f) {
    double low = std::numeric_limits<double>::infinity();
    double high = -low;
    for (std::size_t i = f; i < x.size(); i += features) {
      low = std::min(low, x[i]);
      high = std::max(high, x[i]);
    }
    check_argument(degree_ == 0 || low < high, "x has the same value ", low,
                   " at every point in feature ", f,
                   ": what it does cannot be told; leave it out or vary it");
    next.centre_.push_back(low / 2 + high / 2);
    next.scale_.push_back(low < high ? high / 2 - low / 2 : 1.0);
  }
  next.exponents_ = monomials(features, static_cast<int>(degree_));
  detail::Matrix a(y.size(), count);
  for (std::size_t i = 0; i < y.size(); ++i) {
    for (std::size_t j = 0; j < count; ++j) {
      a.at(i, j) = next.monomial(j, x.subspan(i * features, features), features);
    }
  }
  detail::LeastSquares solved = detail::solve_least_squares(a, {y.begin(), y.end()});
  check_argument(solved.rank == count, "x leaves ", count - solved.rank, " of ", count,
                 " coefficients open (points on a line, or too close together): use a lower degree "
                 "or points that are further apart");
  next.weights_ = std::move(solved.x);
  *this = std::move(next);
}

double PolynomialRegression::monomial(std::size_t index, std::span<const double> point,
                                      std::size_t except) const {
  double value = 1;
  for (std::size_t f = 0; f < point.size(); ++f) {
    value *= f == except ? 1.0 : std::pow(scaled(f, point[f]), exponents_[index][f]);
  }
  return value;
}

void PolynomialRegression::check_point(std::size_t features) const {
  check_argument(fitted(), "this PolynomialRegression has not been fitted: call fit first");
  check_argument(features == centre_.size(), "x must have ", centre_.size(),
                 " feature(s) as in fit, got ", features);
}

double PolynomialRegression::predict(std::span<const double> point) const {
  check_point(point.size());
  if (point.size() == 1) {
    return horner(weights_, scaled(0, point[0]));
  }
  double result = 0;
  for (std::size_t j = 0; j < weights_.size(); ++j) {
    result += weights_[j] * monomial(j, point, point.size());
  }
  return result;
}

double PolynomialRegression::predict(double x) const {
  return predict(std::span<const double>(&x, 1));
}

std::vector<double> PolynomialRegression::along(std::span<const double> point,
                                                std::size_t feature) const {
  std::vector<double> result(static_cast<std::size_t>(degree_) + 1);
  for (std::size_t j = 0; j < weights_.size(); ++j) {
    result[static_cast<std::size_t>(exponents_[j][feature])] +=
        weights_[j] * monomial(j, point, feature);
  }
  return result;
}

std::int64_t PolynomialRegression::inverse(double budget, std::int64_t lower,
                                           std::int64_t upper) const {
  const double any = 0;
  return inverse(budget, std::span<const double>(&any, 1), 0, lower, upper);
}

std::int64_t PolynomialRegression::inverse(double budget, std::span<const double> point,
                                           std::size_t feature, std::int64_t lower,
                                           std::int64_t upper) const {
  check_point(point.size());
  check_argument(!std::isnan(budget), "budget must be a number, got nan");
  check_argument(feature < point.size(), "feature must be from 0 to ", point.size() - 1, ", got ",
                 feature);
  check_argument(lower <= upper && lower >= -kLargestSize && upper <= kLargestSize,
                 "lower and upper must be in order and within ±2^53, got ", lower, " and ", upper);
  std::vector<double> at(point.begin(), point.end());
  at[feature] = 0;
  check_finite("point", at);
  const std::vector<double> polynomial = along(at, feature);
  // predict() itself decides, so that the answer is right to the last unit also where both round.
  const auto fits = [&](std::int64_t size) {
    at[feature] = static_cast<double>(size);
    return predict(at) <= budget;
  };
  if (!fits(lower)) {
    return lower - 1;
  }
  // Between neighbouring ends the prediction is monotone; around a turning point every whole number
  // is an end.
  std::vector<std::int64_t> ends;
  const double low = scaled(feature, static_cast<double>(lower));
  const double high = scaled(feature, static_cast<double>(upper));
  for (const double turn : zeros(derivative(polynomial), low, high)) {
    const auto near =
        static_cast<std::int64_t>(std::floor(turn * scale_[feature] + centre_[feature]));
    for (std::int64_t size = near - 1; size <= near + 2; ++size) {
      if (size > lower && size < upper) {
        ends.push_back(size);
      }
    }
  }
  ends.push_back(upper);
  std::sort(ends.begin(), ends.end());
  std::int64_t good = lower;
  for (const std::int64_t end : ends) {
    if (fits(end)) {
      good = end;
      continue;
    }
    return detail::largest_that_holds(good, end, fits);
  }
  return upper;
}

std::vector<double> PolynomialRegression::coefficients() const {
  check_point(centre_.size());
  std::vector<double> result(weights_.size());
  const auto index_of = [&](const std::vector<int>& powers) {
    const auto found = std::find(exponents_.begin(), exponents_.end(), powers);
    return static_cast<std::size_t>(found - exponents_.begin());
  };
  // ((x - c) / s)^e = sum over k of (e over k) x^k (-c)^(e-k) / s^e, multiplied out over features.
  std::vector<int> powers(centre_.size());
  const auto expand = [&](const auto& self, const std::vector<int>& exponents, std::size_t feature,
                          double value) -> void {
    if (feature == exponents.size()) {
      result[index_of(powers)] += value;
      return;
    }
    const int exponent = exponents[feature];
    double choose = 1;
    for (int k = 0; k <= exponent; ++k) {
      powers[feature] = k;
      self(self, exponents, feature + 1,
           value * choose * std::pow(-centre_[feature], exponent - k) /
               std::pow(scale_[feature], exponent));
      choose = choose * (exponent - k) / (k + 1);
    }
  };
  for (std::size_t j = 0; j < weights_.size(); ++j) {
    expand(expand, exponents_[j], 0, weights_[j]);
  }
  return result;
}

}  // namespace brim
