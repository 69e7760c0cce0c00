#pragma once

#include <brim/export.h>

#include <cstddef>
#include <vector>

namespace brim::detail {

/// A dense matrix, row after row.
struct Matrix {
  std::size_t rows;
  std::size_t columns;
  std::vector<double> values;

  Matrix(std::size_t row_count, std::size_t column_count)
      : rows(row_count), columns(column_count), values(row_count * column_count) {}

  [[nodiscard]] double& at(std::size_t row, std::size_t column) {
    return values[row * columns + column];
  }
  [[nodiscard]] double at(std::size_t row, std::size_t column) const {
    return values[row * columns + column];
  }
};

struct LeastSquares {
  std::vector<double> x;  ///< 0 for columns beyond the rank
  std::size_t rank;       ///< of the matrix, by the tolerance
};

/// The x that makes |a x - b| least, by Householder reflections with column pivoting. Columns are
/// brought to length 1 first, so their units do not matter to the rank.
/// @param tolerance a column counts as dependent when less than this share of it is left.
[[nodiscard]] BRIM_API LeastSquares solve_least_squares(const Matrix& a,
                                                        const std::vector<double>& b,
                                                        double tolerance = 1e-12);

/// The x >= 0 that makes |a x - b| least (Lawson and Hanson's active set).
[[nodiscard]] BRIM_API std::vector<double> solve_non_negative(const Matrix& a,
                                                              const std::vector<double>& b);

}  // namespace brim::detail
