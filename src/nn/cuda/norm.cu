#include "nn/cuda/norm.h"

#include "nn/cuda/number.cuh"

// A thread works on packs of 16 bytes of neighbouring elements and follows the channel along them:
// one scheme for channels first and channels last, whatever the sizes divide by. Factors are worked
// out where they are used: they stay in the cache, and a launch of their own would cost more.

namespace brim::nn::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPacksPerThread = 2;

template <class T>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / static_cast<int>(sizeof(T));
  T at[kSize];
};

template <class T, class P>
struct Factors {
  const P* weight;
  const P* variance;
  Wide<T> eps;

  /// The order of torch's own kernel where nothing but the input is trained:
  /// `(x * weight) * invstd`.
  template <class Index>
  __device__ Wide<T> weight_of(Index channel) const {
    return weight == nullptr ? Wide<T>(1) : static_cast<Wide<T>>(widen<P>(weight[channel]));
  }

  template <class Index>
  __device__ Wide<T> invstd_of(Index channel) const {
    return rsqrt(static_cast<Wide<T>>(widen<P>(variance[channel])) + eps);
  }
};

/// Index: 32 bits where they suffice, because division is slow in 64.
template <class T, class P, class Index>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(const T* __restrict__ in, T* __restrict__ out, const Factors<T, P> factors,
                 const Index n, const Index channels, const Index inner, const bool aligned) {
  constexpr int kSize = Pack<T>::kSize;
  const Index step = static_cast<Index>(gridDim.x) * kThreads * kSize;
  for (Index first = (static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x) * kSize; first < n;
       first += step) {
    const bool whole = aligned && n - first >= kSize;
    const int count = n - first >= kSize ? kSize : static_cast<int>(n - first);
    Pack<T> pack;
    if (whole) {
      pack = *reinterpret_cast<const Pack<T>*>(in + first);
    } else {
      for (int i = 0; i < count; ++i) {
        pack.at[i] = in[first + i];
      }
    }
    const Index plane = first / inner;
    Index left = inner - (first - plane * inner);  // elements of this channel from here
    Index channel = plane % channels;
    Wide<T> weight = factors.weight_of(channel);
    Wide<T> invstd = factors.invstd_of(channel);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (i < count) {
        if (left == 0) {
          channel = channel + 1 == channels ? 0 : channel + 1;
          left = inner;
          weight = factors.weight_of(channel);
          invstd = factors.invstd_of(channel);
        }
        --left;
        pack.at[i] = narrow<T>(widen<T>(pack.at[i]) * weight * invstd);
      }
    }
    if (whole) {
      *reinterpret_cast<Pack<T>*>(out + first) = pack;
    } else {
      for (int i = 0; i < count; ++i) {
        out[first + i] = pack.at[i];
      }
    }
  }
}

bool is_aligned(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % alignof(Pack<float>) == 0;
}

template <class T, class P>
void launch(const void* in, const void* weight, const void* variance, double eps, void* out,
            const ChannelBlocks& blocks, cudaStream_t stream) {
  const std::int64_t n = blocks.outer * blocks.channels * blocks.inner;
  const std::int64_t per_block = kThreads * Pack<T>::kSize * kPacksPerThread;
  const std::int64_t wanted = (n + per_block - 1) / per_block;
  const auto grid = static_cast<unsigned>(wanted < (1 << 30) ? wanted : (1 << 30));
  const Factors<T, P> factors{static_cast<const P*>(weight), static_cast<const P*>(variance),
                              static_cast<Wide<T>>(eps)};
  const auto* const from = static_cast<const T*>(in);
  auto* const to = static_cast<T*>(out);
  const bool aligned = is_aligned(in) && is_aligned(out);
  if (n < (std::int64_t{1} << 30)) {  // `first + step` stays below 2^32
    scale_kernel<T, P, std::uint32_t>
        <<<grid, kThreads, 0, stream>>>(from, to, factors, static_cast<std::uint32_t>(n),
                                        static_cast<std::uint32_t>(blocks.channels),
                                        static_cast<std::uint32_t>(blocks.inner), aligned);
  } else {
    scale_kernel<T, P, std::uint64_t>
        <<<grid, kThreads, 0, stream>>>(from, to, factors, static_cast<std::uint64_t>(n),
                                        static_cast<std::uint64_t>(blocks.channels),
                                        static_cast<std::uint64_t>(blocks.inner), aligned);
  }
}

template <class T>
void launch_for(Number type, Number params, const void* in, const void* weight,
                const void* variance, double eps, void* out, const ChannelBlocks& blocks,
                cudaStream_t stream) {
  if (params == type) {
    launch<T, T>(in, weight, variance, eps, out, blocks, stream);
  } else {
    launch<T, float>(in, weight, variance, eps, out, blocks, stream);
  }
}

}  // namespace

void scale_channels(Number type, Number params, const void* in, const void* weight,
                    const void* variance, double eps, void* out, const ChannelBlocks& blocks,
                    cudaStream_t stream) {
  switch (type) {
    case Number::float32:
      return launch<float, float>(in, weight, variance, eps, out, blocks, stream);
    case Number::float64:
      return launch<double, double>(in, weight, variance, eps, out, blocks, stream);
    case Number::float16:
      return launch_for<__half>(type, params, in, weight, variance, eps, out, blocks, stream);
    case Number::bfloat16:
      return launch_for<__nv_bfloat16>(type, params, in, weight, variance, eps, out, blocks,
                                       stream);
    default:
      return;
  }
}

}  // namespace brim::nn::cuda
