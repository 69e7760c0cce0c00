#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "nn/cuda/number.cuh"

// What the kernels share.

namespace brim::nn::cuda {

inline constexpr int kThreads = 256;  // per block
inline constexpr int kWarp = 32;

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

inline bool is_aligned(const void* pointer, std::size_t bytes = 16) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

/// Calls run(std::integral_constant<int, elements that a thread loads at once>()): those of 16
/// bytes, or one.
template <class T, class Run>
void with_pack(bool whole_packs, const Run& run) {
  if (whole_packs) {
    run(std::integral_constant<int, kPackOf<T>>());
  } else {
    run(std::integral_constant<int, 1>());
  }
}

template <class Int>
unsigned blocks_for(Int n) {
  return static_cast<unsigned>((n + kThreads - 1) / kThreads);
}

}  // namespace brim::nn::cuda
