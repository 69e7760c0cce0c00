#include <brim/predict/need_bound.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace brim {
namespace {

constexpr double kZero = 1e-12;          // for values that are at most about 1
constexpr std::size_t kMostSteps = 500;  // usually it takes about ten

/// Exchanges a variable in the basis (the row's) with one outside it (the column's). The last
/// column is the right-hand side.
template <std::size_t Width>
void pivot(std::vector<std::array<double, Width>>& table, std::size_t row, std::size_t column) {
  const double by = table[row][column];
  for (std::size_t j = 0; j < Width; ++j) {
    table[row][j] /= by;
  }
  table[row][column] = 1 / by;
  for (std::size_t i = 0; i < table.size(); ++i) {
    const double factor = table[i][column];
    if (i == row || factor == 0) {
      continue;
    }
    table[i][column] = 0;
    for (std::size_t j = 0; j < Width; ++j) {
      table[i][j] -= factor * table[row][j];
    }
  }
}

/// The variable to bring into the basis: the steepest one, their number if none gains. After many
/// steps the first one, which cannot cycle (Bland's rule).
template <std::size_t Width>
std::size_t entering(const std::array<double, Width>& objective, std::size_t step) {
  constexpr std::size_t kTerms = Width - 1;
  constexpr std::size_t kMany = 50;
  std::size_t best = kTerms;
  for (std::size_t j = 0; j < kTerms; ++j) {
    if (objective[j] < -kZero && (best == kTerms || objective[j] < objective[best])) {
      best = j;
      if (step > kMany) {
        break;
      }
    }
  }
  return best;
}

}  // namespace

template <std::size_t Count>
void TermBound<Count>::add(const Terms& terms, double bytes) {
  Terms row{};
  std::transform(terms.begin(), terms.end(), row.begin(), [&](double t) { return t / bytes; });
  const auto implied = [](const Terms& one, const Terms& by) {
    return std::equal(one.begin(), one.end(), by.begin(), std::less_equal<>());
  };
  if (std::any_of(rows_.begin(), rows_.end(), [&](const Terms& r) { return implied(row, r); })) {
    return;
  }
  std::erase_if(rows_, [&](const Terms& r) { return implied(r, row); });
  rows_.push_back(row);
}

template <std::size_t Count>
double TermBound<Count>::at(const Terms& terms) const {
  using Row = std::array<double, kTerms + 1>;
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  // Units are chosen so that the largest figure of each column is 1.
  Terms unit{};
  for (const Terms& row : rows_) {
    for (std::size_t j = 0; j < kTerms; ++j) {
      unit[j] = std::max(unit[j], row[j]);
    }
  }
  Row objective{};
  double scale = 0;
  for (std::size_t j = 0; j < kTerms; ++j) {
    if (unit[j] > 0) {
      objective[j] = -terms[j] / unit[j];
      scale = std::max(scale, -objective[j]);
    } else if (terms[j] > 0) {
      return kInfinity;
    }
  }
  if (scale == 0) {
    return 0;
  }
  scale = std::exp2(std::ceil(std::log2(scale)));  // rounds nothing, so equal bounds stay equal
  std::vector<Row> table;
  table.reserve(rows_.size() + 1);
  for (const Terms& row : rows_) {
    Row& made = table.emplace_back();
    for (std::size_t j = 0; j < kTerms; ++j) {
      made[j] = unit[j] > 0 ? row[j] / unit[j] : 0.0;
    }
    made.back() = 1;
  }
  for (double& value : objective) {
    value /= scale;
  }
  table.push_back(objective);
  const std::size_t rows = rows_.size();
  for (std::size_t step = 0;; ++step) {
    const std::size_t column = entering(table.back(), step);
    if (column == kTerms) {
      return table.back().back() * scale;
    }
    if (step == kMostSteps) {
      // Rounding can make it cycle all the same. Every variable is at most 1, in these units.
      double bound = table.back().back();
      for (std::size_t j = 0; j < kTerms; ++j) {
        bound += std::max(-table.back()[j], 0.0);
      }
      return bound * scale;
    }
    std::size_t leaving = rows;
    double least = kInfinity;
    for (std::size_t i = 0; i < rows; ++i) {
      const double ratio =
          table[i][column] > kZero ? table[i].back() / table[i][column] : kInfinity;
      if (ratio < least) {
        least = ratio;
        leaving = i;
      }
    }
    if (leaving == rows) {
      return kInfinity;
    }
    pivot(table, leaving, column);
  }
}

template class TermBound<9>;
template class TermBound<24>;

}  // namespace brim
