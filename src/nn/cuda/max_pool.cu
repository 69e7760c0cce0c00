#include "nn/cuda/pool.cuh"

namespace brim::nn::cuda {
namespace {

template <class W>
__device__ bool is_nan(W x) {
  return x != x;
}

/// kSide: the window is kSide x kSide, flat, without dilation; 0: any.
template <int kPack, int kSide, class T, class Int>
__global__ void __launch_bounds__(kThreads)
    pack_kernel(const T* __restrict__ in, T* __restrict__ out, std::uint8_t* __restrict__ offsets,
                const Shape<Int> s, const Int n) {
  const Int i = thread_index<Int>();
  if (i >= n) {
    return;
  }
  const Place<Int> place(i, s.by_packs, s.by_out);
  const Int start_d = place.at[0] * s.stride[0] - s.padding[0];
  const Int start_h = place.at[1] * s.stride[1] - s.padding[1];
  const Int start_w = place.at[2] * s.stride[2] - s.padding[2];
  Pack<T, kPack> best;
  Pack<std::uint8_t, kPack> found;
  bool any = false;
  const auto look = [&](Int kd, Int kh, Int kw, Int k) {
    const Int id = start_d + kd * s.dilation[0];
    const Int ih = start_h + kh * s.dilation[1];
    const Int iw = start_w + kw * s.dilation[2];
    if (id < 0 || id >= s.in[0] || ih < 0 || ih >= s.in[1] || iw < 0 || iw >= s.in[2]) {
      return;
    }
    const Int pixel = ((place.plane * s.in[0] + id) * s.in[1] + ih) * s.in[2] + iw;
    const auto now = load<T, kPack>(in + pixel * s.channels + place.pack * kPack);
#pragma unroll
    for (int c = 0; c < kPack; ++c) {
      const Wide<T> value = widen<T>(now.at[c]);
      // As torch: of equal ones the first stays, and NaN beats all.
      if (!any || value > widen<T>(best.at[c]) || is_nan(value)) {
        best.at[c] = now.at[c];
        found.at[c] = static_cast<std::uint8_t>(k);
      }
    }
    any = true;
  };
  if constexpr (kSide != 0) {
#pragma unroll
    for (int kh = 0; kh < kSide; ++kh) {
#pragma unroll
      for (int kw = 0; kw < kSide; ++kw) {
        look(0, kh, kw, kh * kSide + kw);
      }
    }
  } else {
    Int k = 0;
    for (Int kd = 0; kd < s.kernel[0]; ++kd) {
      for (Int kh = 0; kh < s.kernel[1]; ++kh) {
        for (Int kw = 0; kw < s.kernel[2]; ++kw) {
          look(kd, kh, kw, k++);
        }
      }
    }
  }
  store<kPack>(best, out + i * kPack);
  store<kPack>(found, offsets + i * kPack);
}

/// The place of `i` in the window of output `o`; below 0 if a dilated window steps over it.
template <class Int>
__device__ Int place_in(const Shape<Int>& s, int d, Int i, Int o) {
  const Int distance = i + s.padding[d] - o * s.stride[d];
  if (s.dilation[d] == 1) {
    return distance;
  }
  return distance % s.dilation[d] == 0 ? distance / s.dilation[d] : -1;
}

template <int kPack, class T, class Int>
__global__ void __launch_bounds__(kThreads)
    scatter_kernel(const T* __restrict__ grad, const std::uint8_t* __restrict__ offsets,
                   T* __restrict__ grad_input, const Shape<Int> s, const Int n) {
  const Int i = thread_index<Int>();
  if (i >= n) {
    return;
  }
  const Place<Int> place(i, s.by_packs, s.by_in);
  Int begin[3];
  Int end[3];
  for (int d = 0; d < 3; ++d) {
    covering(s, d, place.at[d], begin[d], end[d]);
  }
  Wide<T> sums[kPack] = {};
  for (Int od = begin[0]; od < end[0]; ++od) {
    const Int kd = place_in(s, 0, place.at[0], od);
    for (Int oh = begin[1]; oh < end[1]; ++oh) {
      const Int kh = place_in(s, 1, place.at[1], oh);
      for (Int ow = begin[2]; ow < end[2]; ++ow) {
        const Int kw = place_in(s, 2, place.at[2], ow);
        if (kd < 0 || kh < 0 || kw < 0) {
          continue;
        }
        const auto k = static_cast<std::uint8_t>((kd * s.kernel[1] + kh) * s.kernel[2] + kw);
        const Int pixel = ((place.plane * s.out[0] + od) * s.out[1] + oh) * s.out[2] + ow;
        const Int first = pixel * s.channels + place.pack * kPack;
        const auto found = load<std::uint8_t, kPack>(offsets + first);
        const auto now = load<T, kPack>(grad + first);
#pragma unroll
        for (int c = 0; c < kPack; ++c) {
          if (found.at[c] == k) {
            sums[c] += widen<T>(now.at[c]);
          }
        }
      }
    }
  }
  Pack<T, kPack> result;
#pragma unroll
  for (int c = 0; c < kPack; ++c) {
    result.at[c] = narrow<T>(sums[c]);
  }
  store<kPack>(result, grad_input + i * kPack);
}

}  // namespace

void max_pool_pack(Number type, const void* in, void* out, std::uint8_t* offsets,
                   const PoolGeometry& g, cudaStream_t stream) {
  const bool flat = g.kernel[0] == 1 && g.padding[0] == 0 && g.stride[0] == 1 &&
                    g.dilation[1] == 1 && g.dilation[2] == 1 && g.kernel[1] == g.kernel[2];
  with_shape(type, in, out, offsets, g, g.out_size(),
             [&](auto* from, auto* to, auto pack, const auto& shape, auto n) {
               const auto launch = [&](auto side) {
                 pack_kernel<decltype(pack)::value, decltype(side)::value>
                     <<<blocks_for(n), kThreads, 0, stream>>>(from, to, offsets, shape, n);
               };
               if (flat && g.kernel[2] == 2) {
                 launch(std::integral_constant<int, 2>());
               } else if (flat && g.kernel[2] == 3) {
                 launch(std::integral_constant<int, 3>());
               } else {
                 launch(std::integral_constant<int, 0>());
               }
             });
}

void max_pool_scatter(Number type, const void* grad, const std::uint8_t* offsets, void* grad_input,
                      const PoolGeometry& g, cudaStream_t stream) {
  with_shape(type, grad, grad_input, offsets, g, g.in_size(),
             [&](auto* from, auto* to, auto pack, const auto& shape, auto n) {
               scatter_kernel<decltype(pack)::value>
                   <<<blocks_for(n), kThreads, 0, stream>>>(from, offsets, to, shape, n);
             });
}

}  // namespace brim::nn::cuda
