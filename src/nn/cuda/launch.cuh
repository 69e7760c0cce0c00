#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

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

}  // namespace brim::nn::cuda
