#include "nn/cuda/bits.h"

#include "nn/cuda/launch.cuh"
#include "nn/ops/bitmask_functions.h"

// A thread works on packs of 16 bytes: two doubles, four floats, eight halves or sixteen bytes.
// Neighbouring threads have neighbouring packs, so that every access of a warp is one piece. Where
// a pack holds fewer than eight elements, two or four threads put a byte of bits together.

namespace brim::nn::cuda {
namespace {

constexpr int kPacksPerThread = 4;  // loads in flight

template <class T>
using OwnPack = Pack<T, kPackOf<T>>;

/// Elements of one thread. Beyond the end they are zero.
template <class T>
__device__ OwnPack<T> load_within(const T* from, std::int64_t first, std::int64_t n, bool aligned) {
  if (aligned && first + kPackOf<T> <= n) {
    return load<T, kPackOf<T>>(from + first);
  }
  OwnPack<T> pack;
#pragma unroll
  for (int i = 0; i < kPackOf<T>; ++i) {
    pack.at[i] = first + i < n ? from[first + i] : T(0);
  }
  return pack;
}

template <class T>
__device__ void store_within(const OwnPack<T>& pack, T* to, std::int64_t first, std::int64_t n,
                             bool aligned) {
  if (aligned && first + kPackOf<T> <= n) {
    return store(pack, to + first);
  }
#pragma unroll
  for (int i = 0; i < kPackOf<T>; ++i) {
    if (first + i < n) {
      to[first + i] = pack.at[i];
    }
  }
}

/// Stores the bits of one pack: bit i for its element i. All threads of a warp call it together.
template <int kElements>
__device__ void store_bits(unsigned bits, std::uint8_t* to, std::int64_t first, std::int64_t n) {
  if (first < n && first + kElements > n) {
    bits &= (1U << static_cast<unsigned>(n - first)) - 1U;
  }
  if constexpr (kElements >= 8) {
#pragma unroll
    for (int byte = 0; byte < kElements / 8; ++byte) {
      if (first + 8 * byte < n) {
        to[first / 8 + byte] = static_cast<std::uint8_t>(bits >> (8 * byte));
      }
    }
  } else {
    constexpr int kSharing = 8 / kElements;  // threads to a byte
    const int part = static_cast<int>(threadIdx.x) % kSharing;
    bits = first < n ? bits << (part * kElements) : 0U;
#pragma unroll
    for (int apart = 1; apart < kSharing; apart *= 2) {
      bits |= __shfl_xor_sync(0xffffffffU, bits, apart);
    }
    if (part == 0 && first < n) {
      to[first / 8] = static_cast<std::uint8_t>(bits);
    }
  }
}

/// Bits of the pack that begins at `first`, from bit 0 on.
template <int kElements>
__device__ unsigned load_bits(const std::uint8_t* from, std::int64_t first, std::int64_t n) {
  static_assert(kElements <= 8);
  return first < n ? static_cast<unsigned>(from[first / 8]) >> static_cast<unsigned>(first % 8)
                   : 0U;
}

/// The first element of this thread's pack number `turn`.
template <class T>
__device__ std::int64_t first_of(int turn) {
  const std::int64_t block = static_cast<std::int64_t>(blockIdx.x) * kPacksPerThread + turn;
  return (block * kThreads + threadIdx.x) * kPackOf<T>;
}

/// For bits of a mask: its values are not written.
struct IsSet {
  template <class X>
  __device__ bool passes(X x) const {
    return x != 0;
  }
};

/// The bits of `in`, and the function's values.
template <class T, class Function>
__global__ void __launch_bounds__(kThreads)
    pack_kernel(const T* in, T* out, std::uint8_t* bits, std::int64_t n, bool aligned,
                Function function) {
  OwnPack<T> packs[kPacksPerThread];
#pragma unroll
  for (int turn = 0; turn < kPacksPerThread; ++turn) {
    packs[turn] = load_within(in, first_of<T>(turn), n, aligned);
  }
#pragma unroll
  for (int turn = 0; turn < kPacksPerThread; ++turn) {
    const std::int64_t first = first_of<T>(turn);
    unsigned set = 0;
#pragma unroll
    for (int i = 0; i < kPackOf<T>; ++i) {
      T& element = packs[turn].at[i];
      const Wide<T> x = widen(element);
      const bool passes = function.passes(x);
      set |= static_cast<unsigned>(passes) << i;
      if constexpr (!std::is_same_v<Function, IsSet>) {
        element = narrow<T>(function.value(x, passes));
      }
    }
    if constexpr (!std::is_same_v<Function, IsSet>) {
      store_within(packs[turn], out, first, n, aligned);
    }
    store_bits<kPackOf<T>>(set, bits, first, n);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    apply_kernel(const T* in, const std::uint8_t* bits, T* out, std::int64_t n, bool aligned,
                 Wide<T> on, Wide<T> off) {
  OwnPack<T> packs[kPacksPerThread];
  unsigned flags[kPacksPerThread];
#pragma unroll
  for (int turn = 0; turn < kPacksPerThread; ++turn) {
    const std::int64_t first = first_of<T>(turn);
    packs[turn] = load_within(in, first, n, aligned);
    flags[turn] = load_bits<kPackOf<T>>(bits, first, n);
  }
#pragma unroll
  for (int turn = 0; turn < kPacksPerThread; ++turn) {
#pragma unroll
    for (int i = 0; i < kPackOf<T>; ++i) {
      T& element = packs[turn].at[i];
      const Wide<T> factor = (flags[turn] >> i & 1U) != 0 ? on : off;
      // Not a product where the factor is 0: it would be NaN for inf.
      element = factor == 0 ? T(0) : narrow<T>(widen(element) * factor);
    }
    store_within(packs[turn], out, first_of<T>(turn), n, aligned);
  }
}

template <class T>
dim3 blocks_of(std::int64_t n) {
  constexpr std::int64_t kPerBlock =
      static_cast<std::int64_t>(kThreads) * kPacksPerThread * kPackOf<T>;
  return dim3(static_cast<unsigned>((n + kPerBlock - 1) / kPerBlock));
}

template <class T, class Function>
void launch_pack(const void* from, void* to, std::uint8_t* bits, std::int64_t n,
                 const Function& function, cudaStream_t stream) {
  pack_kernel<<<blocks_of<T>(n), kThreads, 0, stream>>>(
      static_cast<const T*>(from), static_cast<T*>(to), bits, n, is_aligned(from) && is_aligned(to),
      function);
}

}  // namespace

void bitmask_pack(Number type, const void* in, void* out, std::uint8_t* bits, std::int64_t n,
                  std::string_view name, double a, double b, cudaStream_t stream) {
  with_type(type, [=](auto t) {
    using T = typename decltype(t)::Element;
    bitmask::with_function<Wide<T>, T>(name, a, b, [=](const auto& function) {
      launch_pack<T>(in, out, bits, n, function, stream);
    });
  });
}

void pack_bits(Number type, const void* mask, std::uint8_t* bits, std::int64_t n,
               cudaStream_t stream) {
  if (type == Number::byte) {
    return launch_pack<std::uint8_t>(mask, nullptr, bits, n, IsSet(), stream);
  }
  with_type(type, [=](auto t) {
    launch_pack<typename decltype(t)::Element>(mask, nullptr, bits, n, IsSet(), stream);
  });
}

void apply_bits(Number type, const void* in, const std::uint8_t* bits, void* out, std::int64_t n,
                double on, double off, cudaStream_t stream) {
  with_type(type, [=](auto t) {
    using T = typename decltype(t)::Element;
    apply_kernel<<<blocks_of<T>(n), kThreads, 0, stream>>>(
        static_cast<const T*>(in), bits, static_cast<T*>(out), n, is_aligned(in) && is_aligned(out),
        static_cast<Wide<T>>(on), static_cast<Wide<T>>(off));
  });
}

}  // namespace brim::nn::cuda
