#include <brim/predict/need_bound.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

namespace brim {
namespace {

constexpr std::size_t kTerms = NeedBound::kTerms;
constexpr std::size_t kColumns = kTerms + 1;  // the last one is the right-hand side
constexpr double kZero = 1e-12;               // for values that are at most about 1
constexpr std::size_t kMostSteps = 500;       // usually it takes about ten
using Row = std::array<double, kColumns>;

/// Exchanges a variable in the basis (the row's) with one outside it (the column's).
void pivot(std::vector<Row>& table, std::size_t row, std::size_t column) {
  const double by = table[row][column];
  for (std::size_t j = 0; j < kColumns; ++j) {
    table[row][j] /= by;
  }
  table[row][column] = 1 / by;
  for (std::size_t i = 0; i < table.size(); ++i) {
    const double factor = table[i][column];
    if (i == row || factor == 0) {
      continue;
    }
    table[i][column] = 0;
    for (std::size_t j = 0; j < kColumns; ++j) {
      table[i][j] -= factor * table[row][j];
    }
  }
}

/// The variable to bring into the basis: the steepest one, kTerms if none gains. After many steps
/// the first one, which cannot cycle (Bland's rule).
std::size_t entering(const Row& objective, std::size_t step) {
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

void NeedBound::add(const Terms& terms, double bytes) {
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

NeedBound::Steepest NeedBound::steepest(const Terms& objective) const {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  // Units are chosen so that the largest figure of each column is 1.
  Terms unit{};
  for (const Terms& row : rows_) {
    for (std::size_t j = 0; j < kTerms; ++j) {
      unit[j] = std::max(unit[j], row[j]);
    }
  }
  std::vector<Row> table(rows_.size() + 1);
  Row& gains = table.back();
  double scale = 0;
  for (std::size_t j = 0; j < kTerms; ++j) {
    if (unit[j] > 0) {
      gains[j] = -objective[j] / unit[j];
      scale = std::max(scale, -gains[j]);
    } else if (objective[j] > 0) {
      return {kInfinity, {}};
    }
  }
  if (scale == 0) {
    return {};
  }
  for (double& value : gains) {
    value /= scale;
  }
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    for (std::size_t j = 0; j < kTerms; ++j) {
      table[i][j] = unit[j] > 0 ? rows_[i][j] / unit[j] : 0.0;
    }
    table[i].back() = 1;
  }
  // Which variable each row and column stands for; those from kTerms on are slack.
  std::vector<std::size_t> basis(rows_.size());
  std::iota(basis.begin(), basis.end(), kTerms);
  std::array<std::size_t, kTerms> outside{};
  std::iota(outside.begin(), outside.end(), std::size_t{0});
  double beyond = 0;  // what the best solution may have more
  for (std::size_t step = 0;; ++step) {
    const std::size_t column = entering(table.back(), step);
    if (column == kTerms) {
      break;
    }
    if (step == kMostSteps) {
      // Rounding can make it cycle all the same. Every variable is at most 1, in these units.
      for (std::size_t j = 0; j < kTerms; ++j) {
        beyond += std::max(-table.back()[j], 0.0);
      }
      break;
    }
    std::size_t leaving = rows_.size();
    double least = kInfinity;
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      const double ratio =
          table[i][column] > kZero ? table[i].back() / table[i][column] : kInfinity;
      if (ratio < least) {
        least = ratio;
        leaving = i;
      }
    }
    if (leaving == rows_.size()) {
      return {kInfinity, {}};
    }
    pivot(table, leaving, column);
    std::swap(basis[leaving], outside[column]);
  }
  Steepest result{(table.back().back() + beyond) * scale, {}};
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    if (basis[i] < kTerms && table[i].back() > kZero) {
      result.phase[basis[i]] = table[i].back() / unit[basis[i]];
    }
  }
  return result;
}

}  // namespace brim
