#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "nn/cuda/bits.h"
#include "nn/cuda/number.cuh"

// What the kernels over pools and channels share.

namespace brim::nn::cuda {

inline constexpr int kThreads = 256;  // per block

/// Elements that a thread loads at once.
template <class T, int kPack>
struct alignas(sizeof(T) * kPack) Pack {
  T at[kPack];
};

template <class T>
inline constexpr int kPackOf = 16 / static_cast<int>(sizeof(T));

template <class T, int kPack>
__device__ Pack<T, kPack> load(const T* from) {
  return *reinterpret_cast<const Pack<T, kPack>*>(from);
}

template <int kPack, class T>
__device__ void store(const Pack<T, kPack>& pack, T* to) {
  *reinterpret_cast<Pack<T, kPack>*>(to) = pack;
}

inline bool is_aligned(const void* pointer, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

template <class Int>
unsigned blocks_for(Int n) {
  return static_cast<unsigned>((n + kThreads - 1) / kThreads);
}

template <class T>
struct Type {
  using Element = T;
};

/// Calls run(Type<T>()) for the type. Whoever calls has checked it.
template <class Run>
void with_type(Number type, const Run& run) {
  switch (type) {
    case Number::float32:
      return run(Type<float>());
    case Number::float64:
      return run(Type<double>());
    case Number::float16:
      return run(Type<__half>());
    case Number::bfloat16:
      return run(Type<__nv_bfloat16>());
    default:
      return;
  }
}

}  // namespace brim::nn::cuda
