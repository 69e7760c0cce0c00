#include "nn/cuda/pool.cuh"

namespace brim::nn::cuda {
namespace {

/// Windows of an average pooling along one dimension.
template <class Int, bool kAdaptive>
struct Windows {
  const Shape<Int>& s;
  int d;

  /// Outputs whose windows hold `i`.
  __device__ void over(Int i, Int& begin, Int& end) const {
    if constexpr (kAdaptive) {
      const auto at = static_cast<std::int64_t>(i);
      begin = static_cast<Int>(at * s.out[d] / s.in[d]);
      end = static_cast<Int>(((at + 1) * s.out[d] + s.in[d] - 1) / s.in[d]);
    } else {
      covering(s, d, i, begin, end);
    }
  }

  /// What the window of output `o` counts for in the divisor.
  __device__ Int size(Int o, bool count_include_pad) const {
    if constexpr (kAdaptive) {
      const auto at = static_cast<std::int64_t>(o);
      const std::int64_t begin = at * s.in[d] / s.out[d];
      return static_cast<Int>(((at + 1) * s.in[d] + s.out[d] - 1) / s.out[d] - begin);
    } else {
      Int begin = o * s.stride[d] - s.padding[d];
      Int end = begin + s.kernel[d];
      const Int most = s.in[d] + s.padding[d];
      end = end < most ? end : most;
      if (!count_include_pad) {
        begin = begin > 0 ? begin : 0;
        end = end < s.in[d] ? end : s.in[d];
      }
      return end - begin;
    }
  }
};

/// a / b, rounded to T, as torch does it for every window.
template <class T, class Int>
__device__ T quotient(T a, Int b) {
  return narrow<T>(widen<T>(a) / widen<T>(narrow<T>(static_cast<Wide<T>>(b))));
}

template <int kPack, bool kAdaptive, class T, class Int>
__global__ void __launch_bounds__(kThreads)
    avg_kernel(const T* __restrict__ grad, T* __restrict__ grad_input, const Shape<Int> s,
               const Int n, const bool count_include_pad, const Int divisor) {
  const Int i = thread_index<Int>();
  if (i >= n) {
    return;
  }
  const Place<Int> place(i, s.by_packs, s.by_in);
  const Windows<Int, kAdaptive> deep{s, 0};
  const Windows<Int, kAdaptive> high{s, 1};
  const Windows<Int, kAdaptive> wide{s, 2};
  Int begin[3];
  Int end[3];
  deep.over(place.at[0], begin[0], end[0]);
  high.over(place.at[1], begin[1], end[1]);
  wide.over(place.at[2], begin[2], end[2]);
  Wide<T> sums[kPack] = {};
  for (Int od = begin[0]; od < end[0]; ++od) {
    const Int size_d = deep.size(od, count_include_pad);
    for (Int oh = begin[1]; oh < end[1]; ++oh) {
      const Int size_h = high.size(oh, count_include_pad);
      for (Int ow = begin[2]; ow < end[2]; ++ow) {
        const Int size_w = wide.size(ow, count_include_pad);
        const Int by = divisor != 0 ? divisor : size_d * size_h * size_w;
        const Int pixel = ((place.plane * s.out[0] + od) * s.out[1] + oh) * s.out[2] + ow;
        const auto now = load<T, kPack>(grad + pixel * s.channels + place.pack * kPack);
#pragma unroll
        for (int c = 0; c < kPack; ++c) {
          // An adaptive pooling divides by one size after the other.
          const T share = kAdaptive
                              ? quotient(quotient(quotient(now.at[c], size_d), size_h), size_w)
                              : quotient(now.at[c], by);
          sums[c] += widen<T>(share);
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

void avg_pool_backward(Number type, const void* grad, void* grad_input,
                       const PoolGeometry& geometry, const AvgRule& rule, cudaStream_t stream) {
  with_shape(type, grad, grad_input, nullptr, geometry, geometry.in_size(),
             [&](auto* from, auto* to, auto pack, const auto& shape, auto n) {
               const auto launch = [&](auto adaptive) {
                 avg_kernel<decltype(pack)::value, decltype(adaptive)::value>
                     <<<blocks_for(n), kThreads, 0, stream>>>(
                         from, to, shape, n, rule.count_include_pad,
                         static_cast<decltype(n)>(rule.divisor));
               };
               if (rule.adaptive) {
                 launch(std::true_type());
               } else {
                 launch(std::false_type());
               }
             });
}

}  // namespace brim::nn::cuda
