#pragma once

#include "nn/cuda/launch.cuh"
#include "nn/cuda/pool.h"

// One scheme for both orders of memory. A thread works on kPack neighbouring channels of one place
// (channels last, 16 bytes at once), or on one place of one plane (channels first, where a plane
// stands for a sample of one channel). Neighbouring threads read neighbouring memory in both.
//
// Numbers are of 32 bits where all indices fit, and then divisions are a multiplication.

namespace brim::nn::cuda {

/// Divides numbers below 2^31 by a number known at launch.
struct Divider32 {
  std::uint32_t by = 1;
  std::uint32_t factor = 1;
  std::uint32_t shift = 0;

  Divider32() = default;
  explicit Divider32(std::int64_t divisor) : by(static_cast<std::uint32_t>(divisor)) {
    while (shift < 31 && (1U << shift) < by) {
      ++shift;
    }
    const std::uint64_t one = 1;
    factor = static_cast<std::uint32_t>(((one << 32U) * ((one << shift) - by)) / by + 1);
  }

  __device__ int divide(int n) const {
    const auto number = static_cast<std::uint32_t>(n);
    return static_cast<int>((__umulhi(number, factor) + number) >> shift);
  }
};

struct Divider64 {
  std::int64_t by = 1;

  Divider64() = default;
  explicit Divider64(std::int64_t divisor) : by(divisor) {}

  __device__ std::int64_t divide(std::int64_t n) const { return n / by; }
};

template <class Int>
using Divider = std::conditional_t<sizeof(Int) == 4, Divider32, Divider64>;

/// The geometry as the kernels read it.
template <class Int>
struct Shape {
  Int planes;
  Int packs;     // a place's channels, in packs
  Int channels;  // from one place to the next
  Int in[3];
  Int out[3];
  Int kernel[3];
  Int stride[3];
  Int padding[3];
  Int dilation[3];
  Divider<Int> by_packs;
  Divider<Int> by_in[3];
  Divider<Int> by_out[3];
  Divider<Int> by_stride[3];

  Shape(const PoolGeometry& g, int pack)
      : planes(static_cast<Int>(g.channels_last ? g.batch : g.planes())),
        packs(static_cast<Int>(g.channels_last ? g.channels / pack : 1)),
        channels(static_cast<Int>(g.channels_last ? g.channels : 1)),
        by_packs(packs) {
    for (int d = 0; d < 3; ++d) {
      in[d] = static_cast<Int>(g.in[d]);
      out[d] = static_cast<Int>(g.out[d]);
      kernel[d] = static_cast<Int>(g.kernel[d]);
      stride[d] = static_cast<Int>(g.stride[d]);
      padding[d] = static_cast<Int>(g.padding[d]);
      dilation[d] = static_cast<Int>(g.dilation[d]);
      by_in[d] = Divider<Int>(g.in[d]);
      by_out[d] = Divider<Int>(g.out[d]);
      by_stride[d] = Divider<Int>(g.stride[d]);
    }
  }
};

/// What a thread works on: a place of the input or the output, and channels.
template <class Int>
struct Place {
  Int at[3];
  Int plane;
  Int pack;

  __device__ Place(Int i, const Divider<Int>& by_packs, const Divider<Int>* by) {
    pack = remainder(i, by_packs);
    at[2] = remainder(i, by[2]);
    at[1] = remainder(i, by[1]);
    at[0] = remainder(i, by[0]);
    plane = i;
  }

 private:
  static __device__ Int remainder(Int& i, const Divider<Int>& by) {
    const Int quotient = by.divide(i);
    const Int left = i - quotient * static_cast<Int>(by.by);
    i = quotient;
    return left;
  }
};

template <class Int>
__device__ Int thread_index() {
  return static_cast<Int>(blockIdx.x) * kThreads + static_cast<Int>(threadIdx.x);
}

/// Outputs [begin, end) whose windows reach over `i`.
template <class Int>
__device__ void covering(const Shape<Int>& s, int d, Int i, Int& begin, Int& end) {
  const Int at = i + s.padding[d];
  const Int beyond = at - (s.kernel[d] - 1) * s.dilation[d] - 1;
  begin = beyond < 0 ? 0 : s.by_stride[d].divide(beyond) + 1;
  end = s.by_stride[d].divide(at) + 1;
  end = end < s.out[d] ? end : s.out[d];
}

inline bool fits_32_bits(const PoolGeometry& g) {
  constexpr std::int64_t kMost = (std::int64_t{1} << 31) - kThreads;
  // Steps past the end are worked out too before they are found to be there.
  std::int64_t reach = 0;
  for (int d = 0; d < 3; ++d) {
    reach = reach + g.out[d] * g.stride[d] + g.kernel[d] * g.dilation[d];
  }
  return g.planes() * g.in_size() < kMost && g.planes() * g.out_size() < kMost && reach < kMost;
}

/// Calls run(in, out, pack, shape, n): with the pointers' type, the channels that a thread works
/// on, and the number of threads if each of them has one of these packs at one of `places` of a
/// plane.
template <class Run>
void with_shape(Number type, const void* in, void* out, const std::uint8_t* offsets,
                const PoolGeometry& g, std::int64_t places, const Run& run) {
  with_type(type, [&](auto t) {
    using T = typename decltype(t)::Element;
    const auto run_with = [&](auto zero, auto pack) {
      using Int = decltype(zero);
      run(static_cast<const T*>(in), static_cast<T*>(out), pack, Shape<Int>(g, pack),
          static_cast<Int>(g.planes() * places / pack));
    };
    if (!fits_32_bits(g)) {
      return run_with(std::int64_t{}, std::integral_constant<int, 1>());
    }
    const bool packs = g.channels_last && g.channels % kPackOf<T> == 0 && is_aligned(in) &&
                       is_aligned(out) && is_aligned(offsets, kPackOf<T>);
    with_pack<T>(packs, [&](auto pack) { run_with(int{}, pack); });
  });
}

}  // namespace brim::nn::cuda
