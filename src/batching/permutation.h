#pragma once

#include <brim/export.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace brim::batching::detail {

/// A pseudorandom number from any two numbers: the finaliser of splitmix64.
[[nodiscard]] constexpr std::uint64_t mix(std::uint64_t seed, std::uint64_t stream) {
  std::uint64_t x = seed + (stream + 1) * 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

/// Scales a random number to 0 … n - 1. n is at most 2³².
[[nodiscard]] constexpr std::uint64_t below(std::uint64_t random, std::uint64_t n) {
  return ((random >> 32) * n) >> 32;
}

/// A random order of 0 … n - 1 that can be read from any place, and needs no memory for large n.
///
/// Small ones are shuffled (Fisher-Yates). Large ones are a Feistel network on a grid of about
/// √n × √n places, with addition instead of xor, so that few places lie outside 0 … n - 1; those
/// are mapped again. Shuffling 10 million numbers would cost 80 MB and some 100 ms before the first
/// batch, and again whenever a run is resumed.
class BRIM_API Permutation {
 public:
  Permutation() = default;
  Permutation(std::uint64_t n, std::uint64_t seed);

  [[nodiscard]] std::uint64_t size() const { return n_; }

  /// The numbers at places first, first + 1, …
  template <class Index>
  void read(std::uint64_t first, std::span<Index> out) const;

 private:
  static constexpr int kRounds = 4;

  [[nodiscard]] std::uint64_t scramble(std::uint64_t high, std::uint64_t low) const;

  std::uint64_t n_ = 0;
  std::uint64_t rows_ = 0;
  std::uint64_t columns_ = 0;
  std::uint64_t keys_[kRounds] = {};
  std::vector<std::uint32_t> shuffled_;  // of a small one
};

}  // namespace brim::batching::detail
