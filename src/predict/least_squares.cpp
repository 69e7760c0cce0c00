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

std::vector<double> solve_columns(const Matrix& a, const std::vector<double>& b,
                                  const std::vector<std::size_t>& columns) {
  Matrix part(a.rows, columns.size());
  for (std::size_t i = 0; i < a.rows; ++i) {
    for (std::size_t j = 0; j < columns.size(); ++j) {
      part.at(i, j) = a.at(i, columns[j]);
    }
  }
  std::vector<double> result(a.columns);
  const LeastSquares solved = solve_least_squares(part, b);
  for (std::size_t j = 0; j < columns.size(); ++j) {
    result[columns[j]] = solved.x[j];
  }
  return result;
}

/// By how much the square of the residual falls as each x grows.
std::vector<double> descent(const Matrix& a, const std::vector<double>& b,
                            const std::vector<double>& x) {
  std::vector<double> result(a.columns);
  for (std::size_t i = 0; i < a.rows; ++i) {
    double residual = b[i];
    for (std::size_t j = 0; j < a.columns; ++j) {
      residual -= a.at(i, j) * x[j];
    }
    for (std::size_t j = 0; j < a.columns; ++j) {
      result[j] += a.at(i, j) * residual;
    }
  }
  return result;
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

std::vector<double> solve_non_negative(const Matrix& a, const std::vector<double>& b) {
  Matrix scaled = a;
  const std::vector<double> scales = normalise_columns(scaled, a.columns);
  const double length = std::sqrt(std::inner_product(b.begin(), b.end(), b.begin(), 0.0));
  constexpr double kNothingToGain = 1e-11;
  std::vector<double> x(a.columns);
  std::vector<std::size_t> active;
  std::vector<bool> refused(a.columns);
  // Each round adds a column that makes the residual smaller, so it ends; the bound is for
  // rounding.
  for (std::size_t round = 0; round < 10 * a.columns; ++round) {
    const std::vector<double> gain = descent(scaled, b, x);
    std::size_t best = a.columns;
    for (std::size_t j = 0; j < a.columns; ++j) {
      const bool candidate = !refused[j] && gain[j] > kNothingToGain * length &&
                             std::find(active.begin(), active.end(), j) == active.end();
      if (candidate && (best == a.columns || gain[j] > gain[best])) {
        best = j;
      }
    }
    if (best == a.columns) {
      break;
    }
    active.push_back(best);
    std::vector<double> next = solve_columns(scaled, b, active);
    if (next[best] <= 0) {  // by rounding alone: it would go in and out for ever
      active.pop_back();
      refused[best] = true;
      continue;
    }
    refused.assign(a.columns, false);
    const auto negative = [&](std::size_t j) { return next[j] <= 0; };
    while (std::any_of(active.begin(), active.end(), negative)) {
      double step = 1;
      for (const std::size_t j : active) {
        if (negative(j)) {
          step = std::min(step, x[j] / (x[j] - next[j]));
        }
      }
      for (const std::size_t j : active) {
        x[j] += step * (next[j] - x[j]);
      }
      std::erase_if(active, [&](std::size_t j) {
        const bool gone = negative(j) && x[j] <= 1e-14 * length;
        if (gone) {
          x[j] = 0;
        }
        return gone;
      });
      next = solve_columns(scaled, b, active);
    }
    x = std::move(next);
  }
  for (std::size_t j = 0; j < a.columns; ++j) {
    x[j] /= scales[j];
  }
  return x;
}

}  // namespace brim::detail
