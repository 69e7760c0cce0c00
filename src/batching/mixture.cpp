#include <brim/batching/mixture.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "batching/permutation.h"
#include "check_argument.h"

namespace brim::batching {

using brim::detail::check_argument;

void Mixture::check(const std::vector<double>& weights) {
  check_argument(!weights.empty(), "weights must be at least one, got none");
  for (const double weight : weights) {
    check_argument(std::isfinite(weight) && weight >= 0,
                   "weights must be finite and not negative, got ", weight);
  }
  check_argument(*std::ranges::max_element(weights) > 0, "weights must not all be 0");
}

Mixture::Mixture(std::vector<double> weights, std::uint64_t seed) : seed_(seed) {
  check(weights);
  sources_.resize(weights.size(), Source{0, 0, false});
  begin(std::move(weights));
}

void Mixture::begin(std::vector<double> weights) {
  constexpr double kBits = 0x1p-53;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const std::uint64_t random = detail::mix(detail::mix(seed_, changes_.size()), i);
    sources_[i].weight = weights[i];
    sources_[i].size = static_cast<double>(random >> 11U) * kBits;  // a phase in [0, 1)
  }
  changes_.emplace_back(taken_, std::move(weights));
}

std::optional<std::size_t> Mixture::next() const {
  std::optional<std::size_t> earliest;
  double least = std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    const Source& source = sources_[i];
    if (source.dropped || source.weight == 0) {
      continue;
    }
    const double turn = source.size / source.weight;
    if (!earliest || turn < least) {
      earliest = i;
      least = turn;
    }
  }
  return earliest;
}

void Mixture::took(std::size_t source, double size) {
  check_argument(std::isfinite(size) && size >= 0, "sizes must be finite and not negative, got ",
                 size, " for a sample of source ", source);
  sources_.at(source).size += size;
  ++taken_;
}

void Mixture::drop(std::size_t source) { sources_.at(source).dropped = true; }

void Mixture::set_weights(std::vector<double> weights) {
  check(weights);
  check_argument(weights.size() == sources_.size(), "weights must be ", sources_.size(),
                 ", one per source, got ", weights.size());
  begin(std::move(weights));
}

}  // namespace brim::batching
