#include <brim/fit/padded_need.h>
#include <brim/memory/bytes.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <utility>

#include "check_argument.h"

namespace brim {
namespace {

using PaddedTerms = JointNeedBound::Terms;

// A sample's terms: each is a product of sizes, by the exponent of every size.
using Exponents = std::vector<int>;

std::vector<Exponents> products_per_sample(std::size_t sizes) {
  std::vector<Exponents> result;
  for (std::size_t i = 0; i < sizes; ++i) {
    Exponents one(sizes);
    one[i] = 1;
    result.push_back(one);
  }
  for (std::size_t i = 0; i < sizes; ++i) {
    for (std::size_t j = i; j < sizes; ++j) {
      Exponents two(sizes);
      ++two[i];
      ++two[j];
      result.push_back(two);
    }
  }
  if (sizes == 2) {  // attention along one side of a map, or over all of it
    result.insert(result.end(), {{2, 1}, {1, 2}, {2, 2}});
  } else if (sizes > 2) {
    result.emplace_back(sizes, 1);
  }
  return result;
}

// Held for one sample at a time, such as the unfolded image of a convolution.
std::vector<Exponents> products_at_once(std::size_t sizes) {
  std::vector<Exponents> result;
  for (std::size_t i = 0; i < sizes; ++i) {
    Exponents square(sizes);
    square[i] = 2;
    result.push_back(square);
  }
  if (sizes > 1) {
    result.emplace_back(sizes, 1);
  }
  return result;
}

double product_of(const Exponents& exponents, std::span<const double> longest) {
  double result = 1;
  for (std::size_t i = 0; i < longest.size(); ++i) {
    for (int k = 0; k < exponents[i]; ++k) {
      result *= longest[i];
    }
  }
  return result;
}

std::string product_name(const Exponents& exponents) {
  constexpr const char* kNames[] = {"a", "b", "c", "d"};
  std::string result;
  for (std::size_t i = 0; i < exponents.size(); ++i) {
    if (exponents[i] > 0) {
      result += std::string(kNames[i]) + (exponents[i] == 2 ? "²" : "");
    }
  }
  return result;
}

struct PaddedProducts {
  std::vector<Exponents> per_sample;
  std::vector<Exponents> at_once;
};

const PaddedProducts& products_of(std::size_t sizes) {
  static const std::vector<PaddedProducts> all = [] {
    std::vector<PaddedProducts> made;
    for (std::size_t k = 0; k <= PaddedNeed::kMostSizes; ++k) {
      made.push_back({products_per_sample(k), products_at_once(k)});
    }
    return made;
  }();
  return all[sizes];
}

constexpr std::size_t kCountTerms = 3;  // 1, n, n²

}  // namespace

PaddedNeed::PaddedNeed(std::size_t sizes, std::vector<double> weights)
    : sizes_(sizes), weights_(std::move(weights)) {
  detail::check_argument(sizes >= 1 && sizes <= kMostSizes, "a sample must have 1 to ", kMostSizes,
                         " sizes that memory depends on, got ", sizes);
  const std::size_t terms = term_names(sizes).size();
  detail::check_argument(
      weights_.size() == terms &&
          std::ranges::all_of(weights_, [](double w) { return std::isfinite(w) && w >= 0; }),
      "weights must be ", terms, " numbers that are finite and not negative");
}

PaddedTerms PaddedNeed::terms(double n, std::span<const double> longest) {
  const PaddedProducts& products = products_of(longest.size());
  PaddedTerms result{1, n, n * n};
  std::size_t next = kCountTerms;
  for (const Exponents& each : products.per_sample) {
    result[next++] = n * product_of(each, longest);
  }
  for (const Exponents& each : products.at_once) {
    result[next++] = product_of(each, longest);
  }
  return result;
}

std::vector<std::string> PaddedNeed::term_names(std::size_t sizes) {
  const PaddedProducts& products = products_of(sizes);
  std::vector<std::string> result{"1", "n", "n²"};
  for (const Exponents& each : products.per_sample) {
    result.push_back("n·" + product_name(each));
  }
  for (const Exponents& each : products.at_once) {
    result.push_back(product_name(each));
  }
  return result;
}

double PaddedNeed::at(double n, std::span<const double> longest) const {
  const PaddedTerms terms = PaddedNeed::terms(n, longest);
  return std::inner_product(weights_.begin(), weights_.end(), terms.begin(), 0.0);
}

std::int64_t PaddedNeed::largest_count(std::span<const double> longest, double bytes) const {
  constexpr double kMost = 0x1p53;
  const PaddedProducts& products = products_of(sizes_);
  const double* weight = weights_.data();
  double fixed = *weight++;
  double each = *weight++;
  const double squared = *weight++;
  const auto total = [&](const std::vector<Exponents>& of) {
    double result = 0;
    for (const Exponents& exponents : of) {
      if (const double w = *weight++; w > 0) {
        result += w * product_of(exponents, longest);
      }
    }
    return result;
  };
  each += total(products.per_sample);
  fixed += total(products.at_once);
  const double room = bytes - fixed;
  if (!(room >= 0)) {
    return 0;
  }
  double count = kMost;
  if (squared > 0 || each > 0) {
    // Not the difference of the root and `each`, of which little would be left.
    count = 2 * room / (each + std::sqrt(each * each + 4 * squared * room));
  }
  count = std::floor(std::min(count, kMost));
  while (count > 0 && fixed + count * (each + count * squared) > bytes) {
    count = std::min(count - 1, std::floor(count * (1 - 0x1p-50)));  // rounding
  }
  return static_cast<std::int64_t>(count);
}

batching::Limit PaddedNeed::limit(std::int64_t bytes) const {
  const PaddedNeed& need = *this;
  return {
      batching::Cost::joint([need](std::span<const double> longest,
                                   double budget) { return need.largest_count(longest, budget); },
                            [need](std::int64_t n, std::span<const double> longest) {
                              return need.at(static_cast<double>(n), longest);
                            }),
      bytes};
}

std::string PaddedNeed::to_string() const {
  const std::vector<std::string> names = term_names(sizes_);
  std::string sum;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (weights_[i] > 0) {
      char small[32];
      std::snprintf(small, sizeof small, "%.3g B", weights_[i]);
      const std::string bytes =
          weights_[i] >= 10 && weights_[i] < 9e18 ? format_bytes(std::llround(weights_[i])) : small;
      sum += (sum.empty() ? "" : " + ") + bytes + (i == 0 ? "" : " · " + names[i]);
    }
  }
  return "peak = " + (sum.empty() ? "0 B" : sum);
}

}  // namespace brim
