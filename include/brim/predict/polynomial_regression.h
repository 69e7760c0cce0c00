#pragma once

#include <brim/export.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace brim {

/// A polynomial through points, by least squares, and its inverse: the largest size whose
/// prediction stays within a budget.
///
///     brim::PolynomialRegression model(2);
///     model.fit(sizes, bytes);               // one feature per point
///     double expected = model.predict(300);
///     std::int64_t most = model.inverse(8e9);
///
/// With several features it has all monomials up to the total degree. Each feature is shifted and
/// scaled to -1 … 1 before the monomials are built, and the system is solved by Householder QR with
/// column pivoting in double precision, so sizes may span 1 to 1e9.
///
/// A value type. Reading one from several threads is safe; fit() is for its owner.
class BRIM_API PolynomialRegression {
 public:
  static constexpr std::int64_t kLargestDegree = 16;
  static constexpr std::int64_t kLargestSize = std::int64_t{1} << 53;  ///< exact as a double

  /// @throws std::invalid_argument if `degree` is not from 0 to kLargestDegree.
  explicit PolynomialRegression(std::int64_t degree);

  /// Fits to the points, forgetting earlier ones.
  /// @param x the points' features, one point after the other, `features` each.
  /// @param y one value per point.
  /// @throws std::invalid_argument if lengths do not match, a number is not finite, there are fewer
  ///     different points than coefficients, or the points do not determine every coefficient (a
  ///     constant feature, points on a line). The earlier fit then stays.
  void fit(std::span<const double> x, std::span<const double> y, std::size_t features = 1);

  /// The value at one point. @throws std::invalid_argument before fit(), or for another number of
  /// features than it had.
  [[nodiscard]] double predict(std::span<const double> point) const;
  [[nodiscard]] double predict(double x) const;

  /// The largest whole number s from `lower` to `upper` such that no whole number from `lower` to s
  /// has a prediction over `budget`. `lower - 1` if `lower` itself is over: 0 by default.
  /// @throws std::invalid_argument for a budget that is not a number, lower > upper, bounds outside
  ///     ±kLargestSize, or more than one feature.
  [[nodiscard]] std::int64_t inverse(double budget, std::int64_t lower = 1,
                                     std::int64_t upper = kLargestSize) const;

  /// The same for feature number `feature` of several, the others as in `point` (whose own value
  /// for `feature` is ignored).
  [[nodiscard]] std::int64_t inverse(double budget, std::span<const double> point,
                                     std::size_t feature, std::int64_t lower = 1,
                                     std::int64_t upper = kLargestSize) const;

  [[nodiscard]] std::int64_t degree() const { return degree_; }
  [[nodiscard]] std::size_t features() const { return centre_.size(); }
  [[nodiscard]] bool fitted() const { return !weights_.empty(); }

  /// The powers of each feature in each coefficient, constant first.
  [[nodiscard]] const std::vector<std::vector<int>>& exponents() const { return exponents_; }

  /// In the features as given, in the order of exponents(). For reading: where sizes are large and
  /// close together these lose digits that predict() keeps.
  [[nodiscard]] std::vector<double> coefficients() const;

 private:
  [[nodiscard]] double scaled(std::size_t feature, double value) const {
    return (value - centre_[feature]) / scale_[feature];
  }
  void check_point(std::size_t features) const;
  /// One monomial at a point, without the feature `except`.
  [[nodiscard]] double monomial(std::size_t index, std::span<const double> point,
                                std::size_t except) const;
  [[nodiscard]] std::vector<double> along(std::span<const double> point, std::size_t feature) const;

  std::int64_t degree_;
  std::vector<double> centre_;
  std::vector<double> scale_;
  std::vector<std::vector<int>> exponents_;
  std::vector<double> weights_;  // of the monomials of scaled features
};

}  // namespace brim
