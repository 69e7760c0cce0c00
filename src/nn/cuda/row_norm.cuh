#pragma once

#include "nn/cuda/launch.cuh"
#include "nn/cuda/row_norm.h"

// What the kernels on rows share: loads, factors, and how threads share the work.

namespace brim::nn::cuda {

/// How the threads of a block share rows: x of them work on one row, y rows at a time. Both are
/// powers of two.
inline dim3 threads_for(std::int64_t packs) {
  unsigned x = 1;
  while (x < static_cast<unsigned>(kThreads) && x < packs) {
    x *= 2;
  }
  return {x, kThreads / x};
}

/// What a row is multiplied by, or added to.
template <class P>
struct Factors {
  const P* weight;
  float offset;
  float missing;  // in place of each weight, if there is none

  template <int kSize>
  __device__ Pack<float, kSize> load_at(unsigned column) const {
    Pack<float, kSize> result;
    if (weight == nullptr) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        result.at[i] = missing;
      }
      return result;
    }
    // Packs of float32 weights beside half-width elements are wider than a load.
    constexpr int kLoad = kSize < kPackOf<P> ? kSize : kPackOf<P>;
#pragma unroll
    for (int k = 0; k < kSize; k += kLoad) {
      const auto some = load<P, kLoad>(weight + column + k);
#pragma unroll
      for (int i = 0; i < kLoad; ++i) {
        const float value = widen<P>(some.at[i]);
        result.at[k + i] = offset == 0 ? value : __fadd_rn(value, offset);
      }
    }
    return result;
  }
};

/// kSize elements of one type as float32, loaded 16 bytes at a time.
template <int kSize, class T>
__device__ Pack<float, kSize> load_wide(const T* from) {
  Pack<float, kSize> result;
  constexpr int kLoad = kSize < kPackOf<T> ? kSize : kPackOf<T>;
#pragma unroll
  for (int k = 0; k < kSize; k += kLoad) {
    const auto some = load<T, kLoad>(from + k);
#pragma unroll
    for (int i = 0; i < kLoad; ++i) {
      result.at[k + i] = widen<T>(some.at[i]);
    }
  }
  return result;
}

template <int kSize, class T>
__device__ void store_narrow(const Pack<float, kSize>& values, T* to) {
  constexpr int kStore = kSize < kPackOf<T> ? kSize : kPackOf<T>;
#pragma unroll
  for (int k = 0; k < kSize; k += kStore) {
    Pack<T, kStore> some;
#pragma unroll
    for (int i = 0; i < kStore; ++i) {
      some.at[i] = narrow<T>(values.at[k + i]);
    }
    store<kStore>(some, to + k);
  }
}

/// Calls run(std::integral_constant<int, elements that a thread loads at once>(), threads of a
/// block).
template <class T, class Run, class... Pointers>
void with_threads(const NormRows& rows, const Run& run, Pointers... pointers) {
  const bool packs = rows.size % kPackOf<T> == 0 && is_aligned(rows.weight) &&
                     is_aligned(rows.bias) && (is_aligned(pointers) && ...);
  with_pack<T>(packs, [&](auto pack) { run(pack, threads_for(rows.size / pack)); });
}

template <class P>
Factors<P> factors_of(const NormRows& rows) {
  return {static_cast<const P*>(rows.weight), rows.offset, 1};
}

template <class P>
Factors<P> bias_of(const NormRows& rows) {
  return {static_cast<const P*>(rows.bias), 0, 0};
}

/// Blocks for all rows, each row once.
inline unsigned blocks_of(const NormRows& rows, const dim3& threads) {
  return static_cast<unsigned>((rows.rows + threads.y - 1) / threads.y);
}

}  // namespace brim::nn::cuda
