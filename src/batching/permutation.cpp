#include "batching/permutation.h"

#include <cmath>
#include <numeric>
#include <utility>

namespace brim::batching::detail {
namespace {

// Up to here a table is cheaper, and every order is possible.
constexpr std::uint64_t kLargestTable = 1024;

// Random bits of `value`, scaled to 0 … n - 1.
inline std::uint64_t round_function(std::uint64_t value, std::uint64_t key, std::uint64_t n) {
  std::uint64_t x = (value + key) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 32)) * 0x94D049BB133111EBULL;
  return below(x, n);
}

inline std::uint64_t add_modulo(std::uint64_t a, std::uint64_t b, std::uint64_t n) {
  const std::uint64_t sum = a + b;
  return sum >= n ? sum - n : sum;
}

}  // namespace

Permutation::Permutation(std::uint64_t n, std::uint64_t seed) : n_(n) {
  if (n <= kLargestTable) {
    shuffled_.resize(n);
    std::iota(shuffled_.begin(), shuffled_.end(), 0U);
    for (std::uint64_t i = n; i > 1; --i) {
      std::swap(shuffled_[i - 1], shuffled_[below(mix(seed, i), i)]);
    }
    return;
  }
  rows_ = static_cast<std::uint64_t>(std::ceil(std::sqrt(static_cast<double>(n))));
  columns_ = (n + rows_ - 1) / rows_;
  for (std::uint64_t i = 0; i < kRounds; ++i) {
    keys_[i] = mix(seed, i);
  }
}

inline std::uint64_t Permutation::scramble(std::uint64_t high, std::uint64_t low) const {
  high = add_modulo(high, round_function(low, keys_[0], rows_), rows_);
  low = add_modulo(low, round_function(high, keys_[1], columns_), columns_);
  high = add_modulo(high, round_function(low, keys_[2], rows_), rows_);
  low = add_modulo(low, round_function(high, keys_[3], columns_), columns_);
  return high * columns_ + low;
}

template <class Index>
void Permutation::read(std::uint64_t first, std::span<Index> out) const {
  if (!shuffled_.empty()) {
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = static_cast<Index>(shuffled_[first + i]);
    }
    return;
  }
  if (out.empty()) {
    return;
  }
  std::uint64_t high = first / columns_;
  std::uint64_t low = first % columns_;
  for (Index& place : out) {
    std::uint64_t at = scramble(high, low);
    while (at >= n_) {  // beyond the end: mapped again
      at = scramble(at / columns_, at % columns_);
    }
    place = static_cast<Index>(at);
    if (++low == columns_) {
      low = 0;
      ++high;
    }
  }
}

template void Permutation::read(std::uint64_t, std::span<std::int64_t>) const;
template void Permutation::read(std::uint64_t, std::span<std::uint32_t>) const;

}  // namespace brim::batching::detail
