#include "predict/least_squares.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace brim::detail {
namespace {

double column_norm(const Matrix& a, std::size_t column, std::size_t from) {
  double sum = 0;
  for (std::size_t i = from; i < a.rows; ++i) {
    sum += a.at(i, column) * a.at(i, column);
  }
  return std::sqrt(sum);
}

/// Reflects what is right of column k so that column k becomes zero below its diagonal.
void reflect(Matrix& a, std::size_t k, double norm) {
  const double diagonal = a.at(k, k) > 0 ? -norm : norm;  // away from cancellation
  std::vector<double> v(a.rows - k);
  for (std::size_t i = k; i < a.rows; ++i) {
    v[i - k] = a.at(i, k);
    a.at(i, k) = 0;
  }
  v[0] -= diagonal;
  a.at(k, k) = diagonal;
  const double square = std::inner_product(v.begin(), v.end(), v.begin(), 0.0);
  for (std::size_t j = k + 1; j < a.columns && square > 0; ++j) {
    double dot = 0;
    for (std::size_t i = k; i < a.rows; ++i) {
      dot += v[i - k] * a.at(i, j);
    }
    for (std::size_t i = k; i < a.rows; ++i) {
      a.at(i, j) -= 2 * dot / square * v[i - k];
    }
  }
}

/// Brings the first columns to length 1; returns what each has been divided by, 1 for a column of
/// zeros.
std::vector<double> normalise_columns(Matrix& a, std::size_t columns) {
  std::vector<double> scales(columns, 1.0);
  for (std::size_t j = 0; j < columns; ++j) {
    const double norm = column_norm(a, j, 0);
    if (norm > 0) {
      scales[j] = norm;
      for (std::size_t i = 0; i < a.rows; ++i) {
        a.at(i, j) /= norm;
      }
    }
  }
  return scales;
}

}  // namespace

LeastSquares solve_least_squares(const Matrix& given, const std::vector<double>& b,
                                 double tolerance) {
  const std::size_t columns = given.columns;
  Matrix a(given.rows, columns + 1);  // b is the last column
  for (std::size_t i = 0; i < a.rows; ++i) {
    for (std::size_t j = 0; j < columns; ++j) {
      a.at(i, j) = given.at(i, j);
    }
    a.at(i, columns) = b[i];
  }
  const std::vector<double> scales = normalise_columns(a, columns);
  std::vector<std::size_t> order(columns);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::size_t rank = 0;
  for (; rank < std::min(a.rows, columns); ++rank) {
    // Norms are worked out anew each time: updating them loses digits, and the matrices are small.
    std::size_t pivot = rank;
    double largest = -1;
    for (std::size_t j = rank; j < columns; ++j) {
      if (const double norm = column_norm(a, j, rank); norm > largest) {
        largest = norm;
        pivot = j;
      }
    }
    if (largest <= tolerance) {
      break;
    }
    for (std::size_t i = 0; i < a.rows; ++i) {
      std::swap(a.at(i, rank), a.at(i, pivot));
    }
    std::swap(order[rank], order[pivot]);
    reflect(a, rank, largest);
  }
  LeastSquares result{std::vector<double>(columns), rank};
  for (std::size_t i = rank; i-- > 0;) {
    double value = a.at(i, columns);
    for (std::size_t j = i + 1; j < rank; ++j) {
      value -= a.at(i, j) * result.x[order[j]];
    }
    result.x[order[i]] = value / a.at(i, i);
  }
  for (std::size_t j = 0; j < columns; ++j) {
    result.x[j] /= scales[j];
  }
  return result;
}

}  // namespace brim::detail
