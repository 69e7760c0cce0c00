#include "nn/cuda/batch_norm.h"

#include <algorithm>

#include "nn/cuda/launch.cuh"

namespace brim::nn::cuda {
namespace {

template <class T, class P>
struct Norm {
  const P* weight;
  const P* bias;
  const P* mean;
  const P* spread;
  Wide<T> eps;
  bool is_variance;

  __device__ Wide<T> weight_of(unsigned c) const {
    return weight == nullptr ? Wide<T>(1) : static_cast<Wide<T>>(widen<P>(weight[c]));
  }
  __device__ Wide<T> bias_of(unsigned c) const {
    return bias == nullptr ? Wide<T>(0) : static_cast<Wide<T>>(widen<P>(bias[c]));
  }
  __device__ Wide<T> mean_of(unsigned c) const {
    return mean == nullptr ? Wide<T>(0) : static_cast<Wide<T>>(widen<P>(mean[c]));
  }
  __device__ Wide<T> invstd(Wide<T> value) const {
    return is_variance ? rsqrt(value + eps) : value;
  }
  __device__ Wide<T> invstd_of(unsigned c) const {
    return invstd(static_cast<Wide<T>>(widen<P>(spread[c])));
  }
};

template <class T, class P>
Norm<T, P> norm_of(const ChannelNorm& norm) {
  return {static_cast<const P*>(norm.weight), static_cast<const P*>(norm.bias),
          static_cast<const P*>(norm.mean),   static_cast<const P*>(norm.spread),
          static_cast<Wide<T>>(norm.eps),     norm.eps >= 0};
}

// -- Forward again ----------------------------------------------------------------------------

/// A channel's numbers, for one way to round. The intrinsics keep the compiler from fusing more.
template <class W, int kFormula>
struct Affine {
  W weight, mean, invstd, bias;

  Affine() = default;

  __device__ Affine(W factor, W added, W centre, W spread)
      : weight(factor), mean(centre), invstd(spread), bias(added) {
    if constexpr (kFormula == 1 || kFormula == 2) {
      weight = __fmul_rn(weight, invstd);
    }
    if constexpr (kFormula == 1) {
      bias = __fsub_rn(bias, __fmul_rn(mean, weight));
    }
  }

  __device__ W operator()(W x) const {
    if constexpr (kFormula == 0) {
      return __fmaf_rn(__fmul_rn(weight, __fsub_rn(x, mean)), invstd, bias);
    } else if constexpr (kFormula == 1) {
      return __fmaf_rn(x, weight, bias);
    } else if constexpr (kFormula == 2) {
      return __fmaf_rn(__fsub_rn(x, mean), weight, bias);
    } else {
      return x * weight * invstd;
    }
  }
};

template <class T, class Affine>
__device__ T finish(const Affine& affine, T in, const T* added, bool relu) {
  T value = narrow<T>(affine(widen<T>(in)));
  if (added != nullptr) {
    value = narrow<T>(__fadd_rn(widen<T>(value), widen<T>(*added)));
  }
  return relu && widen<T>(value) <= 0 ? narrow<T>(0) : value;
}

/// What the channels from `c` on have in `from`, which is aligned; null: `missing`.
template <int kSize, class W, class P>
__device__ void read_channels(W (&to)[kSize], const P* from, unsigned c, W missing) {
  constexpr int kStep = kSize < kPackOf<P> ? kSize : kPackOf<P>;
#pragma unroll
  for (int i = 0; i < kSize; i += kStep) {
    Pack<P, kStep> values;
    if (from != nullptr) {
      values = load<P, kStep>(from + c + i);
    }
#pragma unroll
    for (int k = 0; k < kStep; ++k) {
      to[i + k] = from == nullptr ? missing : static_cast<W>(widen<P>(values.at[k]));
    }
  }
}

/// What the elements of a pack are scaled and moved with. Channels first: they are of one channel
/// or two, because `inner` is no smaller than a pack; channels last (inner == 1): each is of
/// another.
template <int kFormula, int kSize, class T, class P, class Index>
__device__ void affines_of(Affine<Wide<T>, kFormula> (&affine)[kSize], const Norm<T, P>& norm,
                           Index first, unsigned channels, unsigned inner) {
  using Each = Affine<Wide<T>, kFormula>;
  if (inner == 1) {
    const auto c = static_cast<unsigned>(first % channels);
    Wide<T> weight[kSize], bias[kSize], mean[kSize], spread[kSize];
    read_channels(weight, norm.weight, c, Wide<T>(1));
    read_channels(bias, norm.bias, c, Wide<T>(0));
    read_channels(mean, norm.mean, c, Wide<T>(0));
    read_channels(spread, norm.spread, c, Wide<T>(1));
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      affine[i] = Each(weight[i], bias[i], mean[i], norm.invstd(spread[i]));
    }
    return;
  }
  const auto affine_of = [&](unsigned c) {
    return Each(norm.weight_of(c), norm.bias_of(c), norm.mean_of(c), norm.invstd_of(c));
  };
  const Index row = first / inner;
  const auto c = static_cast<unsigned>(row % channels);
  const auto in_row = static_cast<int>(min((row + 1) * inner - first, Index{kSize}));
  const Each here = affine_of(c);
  const Each next = in_row < kSize ? affine_of(c + 1 == channels ? 0 : c + 1) : here;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    affine[i] = i < in_row ? here : next;
  }
}

/// Packs per thread, a whole number of images (channels last: of places) apart, so that they belong
/// to the same channels.
constexpr int kPerThread = 4;

template <class T, class P, int kFormula, int kSize, class Index>
__global__ void __launch_bounds__(kThreads, 3)
    normalise_kernel(const T* __restrict__ in, const T* __restrict__ added, T* __restrict__ out,
                     const Norm<T, P> norm, const bool relu, const Index packs, const Index apart,
                     const unsigned channels, const unsigned inner) {
  const Index pack = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
  if (pack >= apart) {
    return;
  }
  // All loads before the arithmetic; where there is nothing more, the first again. Held as words:
  // the compiler would give each of several small numbers a register.
  using Words = std::conditional_t<kSize == 1, T, uint4>;
  Index place[kPerThread];
  Words x[kPerThread];
  Words more[kPerThread];
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    place[k] = (pack + k * apart < packs ? pack + k * apart : pack) * kSize;
    x[k] = *reinterpret_cast<const Words*>(in + place[k]);
  }
  if (added != nullptr) {
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      more[k] = *reinterpret_cast<const Words*>(added + place[k]);
    }
  }
  Affine<Wide<T>, kFormula> affine[kSize];
  affines_of(affine, norm, pack * kSize, channels, inner);
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const T* const from = reinterpret_cast<const T*>(&x[k]);
    const T* const plus = reinterpret_cast<const T*>(&more[k]);
    Pack<T, kSize> y;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      y.at[i] = finish(affine[i], from[i], added == nullptr ? nullptr : plus + i, relu);
    }
    if (pack + k * apart < packs) {
      store<kSize>(y, out + place[k]);
    }
  }
}

template <class T, class P, int kFormula>
void launch_normalise(const ChannelNorm& norm, const void* in, const void* added, bool relu,
                      void* out, const ChannelBlocks& blocks, cudaStream_t stream) {
  const std::int64_t n = blocks.outer * blocks.channels * blocks.inner;
  constexpr int kPack = kPackOf<T>;
  const bool fits =
      blocks.inner == 1 ? blocks.channels % kPack == 0 : blocks.inner >= kPack && n % kPack == 0;
  const auto aligned = [](auto... pointer) { return (is_aligned(pointer) && ...); };
  const bool packs = fits && aligned(in, added, out) &&
                     (blocks.inner != 1 || aligned(norm.weight, norm.bias, norm.mean, norm.spread));
  with_pack<T>(packs, [&](auto size) {
    constexpr int kSize = decltype(size)::value;
    // Small tensors get as many threads as large devices run at once, with fewer packs each.
    constexpr std::int64_t kFull = std::int64_t{1} << 17;
    const bool whole = blocks.channels * blocks.inner % kSize == 0;
    const std::int64_t images = whole ? blocks.outer : 1;
    const std::int64_t image_packs = n / kSize / images;
    const std::int64_t least =
        std::max((images + kPerThread - 1) / kPerThread, kFull / image_packs);
    const std::int64_t apart = std::min(images, least) * image_packs;
    const auto run = [&](auto count) {
      using Index = decltype(count);
      normalise_kernel<T, P, kFormula, kSize><<<blocks_for(apart), kThreads, 0, stream>>>(
          static_cast<const T*>(in), static_cast<const T*>(added), static_cast<T*>(out),
          norm_of<T, P>(norm), relu, count, static_cast<Index>(apart),
          static_cast<unsigned>(blocks.channels), static_cast<unsigned>(blocks.inner));
    };
    if (n < (std::int64_t{1} << 32) / kPerThread) {  // a thread counts up to so many
      run(static_cast<std::uint32_t>(n / kSize));
    } else {
      run(static_cast<std::uint64_t>(n / kSize));
    }
  });
}

/// By 2 bytes, as which all types are aligned.
__global__ void copy_two_kernel(const std::uint16_t* one, const std::uint16_t* other,
                                std::uint16_t* out, const std::int64_t count) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) {
    out[i] = one[i];
    out[count + i] = other[i];
  }
}

// -- Backward ---------------------------------------------------------------------------------

/// Sums of a warp, in its first lane.
template <class W>
__device__ W warp_sum(W value) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value += __shfl_down_sync(0xffffffffU, value, offset);
  }
  return value;
}

/// Channels first. A block works on one channel (x) of a part of the batch (y).
template <class T, class P, int kSize>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const T* __restrict__ grad, const T* __restrict__ in, T* __restrict__ grad_in,
                    Wide<T>* __restrict__ sums, const Norm<T, P> norm, const unsigned outer,
                    const unsigned channels, const unsigned inner_packs) {
  using W = Wide<T>;
  const unsigned c = blockIdx.x;
  const W mean = norm.mean_of(c);
  // One factor here and two with channels last, in the orders of torch's own kernels.
  const W factor = norm.invstd_of(c) * norm.weight_of(c);
  const unsigned begin = static_cast<unsigned>(std::uint64_t{outer} * blockIdx.y / gridDim.y);
  const unsigned end = static_cast<unsigned>(std::uint64_t{outer} * (blockIdx.y + 1) / gridDim.y);
  const unsigned count = (end - begin) * inner_packs;
  W sum = 0;
  W dot = 0;
  for (unsigned i = threadIdx.x; i < count; i += kThreads) {
    const unsigned n = i / inner_packs;
    const std::uint64_t place =
        ((std::uint64_t{begin + n} * channels + c) * inner_packs + (i - n * inner_packs)) * kSize;
    const auto g = load<T, kSize>(grad + place);
    const auto x = load<T, kSize>(in + place);
    Pack<T, kSize> result;
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      const W value = widen<T>(g.at[k]);
      sum += value;
      dot += value * (widen<T>(x.at[k]) - mean);
      result.at[k] = narrow<T>(value * factor);
    }
    if (grad_in != nullptr) {
      store<kSize>(result, grad_in + place);
    }
  }
  __shared__ W partial[2][kThreads / kWarp];
  const W warp_of_sum = warp_sum(sum);
  const W warp_of_dot = warp_sum(dot);
  if (threadIdx.x % kWarp == 0) {
    partial[0][threadIdx.x / kWarp] = warp_of_sum;
    partial[1][threadIdx.x / kWarp] = warp_of_dot;
  }
  __syncthreads();
  if (threadIdx.x < 2) {
    W total = 0;
    for (int i = 0; i < kThreads / kWarp; ++i) {
      total += partial[threadIdx.x][i];
    }
    sums[(std::uint64_t{blockIdx.y} * channels + c) * 2 + threadIdx.x] = total;
  }
}

/// Channels last. A block works on 32 neighbouring channels (x) of a part of the rows (y).
template <class T, class P>
__global__ void __launch_bounds__(kThreads)
    backward_rows_kernel(const T* __restrict__ grad, const T* __restrict__ in,
                         T* __restrict__ grad_in, Wide<T>* __restrict__ sums, const Norm<T, P> norm,
                         const std::uint64_t rows, const unsigned channels) {
  using W = Wide<T>;
  constexpr int kLines = kThreads / kWarp;
  const unsigned lane = threadIdx.x % kWarp;
  const unsigned line = threadIdx.x / kWarp;
  const unsigned c = blockIdx.x * kWarp + lane;
  const bool inside = c < channels;
  const W mean = inside ? norm.mean_of(c) : W(0);
  const W weight = inside ? norm.weight_of(c) : W(0);
  const W invstd = inside ? norm.invstd_of(c) : W(0);
  const std::uint64_t begin = rows * blockIdx.y / gridDim.y;
  const std::uint64_t end = rows * (blockIdx.y + 1) / gridDim.y;
  W sum = 0;
  W dot = 0;
  if (inside) {
#pragma unroll 4
    for (std::uint64_t row = begin + line; row < end; row += kLines) {
      const std::uint64_t place = row * channels + c;
      const W value = widen<T>(grad[place]);
      sum += value;
      dot += value * (widen<T>(in[place]) - mean);
      if (grad_in != nullptr) {
        grad_in[place] = narrow<T>(value * weight * invstd);
      }
    }
  }
  __shared__ W partial[2][kLines][kWarp];
  partial[0][line][lane] = sum;
  partial[1][line][lane] = dot;
  __syncthreads();
  if (line < 2 && inside) {
    W total = 0;
    for (int i = 0; i < kLines; ++i) {
      total += partial[line][i][lane];
    }
    sums[(std::uint64_t{blockIdx.y} * channels + c) * 2 + line] = total;
  }
}

/// The parts of each channel, in their order.
template <class T, class P>
__global__ void finish_kernel(const Wide<T>* __restrict__ sums, Wide<T>* __restrict__ grad_weight,
                              Wide<T>* __restrict__ grad_bias, const Norm<T, P> norm,
                              const unsigned channels, const unsigned parts) {
  const unsigned c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c >= channels) {
    return;
  }
  Wide<T> sum = 0;
  Wide<T> dot = 0;
  for (unsigned part = 0; part < parts; ++part) {
    const std::uint64_t place = (std::uint64_t{part} * channels + c) * 2;
    sum += sums[place];
    dot += sums[place + 1];
  }
  grad_weight[c] = dot * norm.invstd_of(c);
  grad_bias[c] = sum;
}

template <class T, class P>
void launch_backward(const ChannelNorm& norm, const void* grad, const void* in, void* sums,
                     void* grad_in, void* grad_weight, void* grad_bias, const ChannelBlocks& blocks,
                     cudaStream_t stream) {
  using W = Wide<T>;
  const auto* const from = static_cast<const T*>(grad);
  const auto* const x = static_cast<const T*>(in);
  auto* const to = static_cast<T*>(grad_in);
  auto* const partial = static_cast<W*>(sums);
  const auto channels = static_cast<unsigned>(blocks.channels);
  const auto parts = static_cast<unsigned>(parts_of(blocks));
  const Norm<T, P> each = norm_of<T, P>(norm);
  if (blocks.inner == 1) {
    const dim3 grid((channels + kWarp - 1) / kWarp, parts);
    backward_rows_kernel<T, P><<<grid, kThreads, 0, stream>>>(
        from, x, to, partial, each, static_cast<std::uint64_t>(blocks.outer), channels);
  } else {
    const auto inner = static_cast<unsigned>(blocks.inner);
    const bool packs =
        inner % kPackOf<T> == 0 && is_aligned(grad) && is_aligned(in) && is_aligned(grad_in);
    with_pack<T>(packs, [&](auto size) {
      constexpr int kSize = decltype(size)::value;
      backward_kernel<T, P, kSize><<<dim3(channels, parts), kThreads, 0, stream>>>(
          from, x, to, partial, each, static_cast<unsigned>(blocks.outer), channels, inner / kSize);
    });
  }
  finish_kernel<T, P><<<blocks_for(channels), kThreads, 0, stream>>>(
      partial, static_cast<W*>(grad_weight), static_cast<W*>(grad_bias), each, channels, parts);
}

}  // namespace

void normalise(Number type, int formula, const ChannelNorm& norm, const void* in, const void* added,
               bool relu, void* out, const ChannelBlocks& blocks, cudaStream_t stream) {
  with_types(type, norm.params, [&](auto t, auto p) {
    using T = typename decltype(t)::Element;
    using P = typename decltype(p)::Element;
    const auto run = [&](auto chosen) {
      launch_normalise<T, P, decltype(chosen)::value>(norm, in, added, relu, out, blocks, stream);
    };
    if constexpr (!std::is_same_v<T, double>) {
      switch (formula) {
        case 0:
          return run(std::integral_constant<int, 0>());
        case 1:
          return run(std::integral_constant<int, 1>());
        case 2:
          return run(std::integral_constant<int, 2>());
        default:
          break;
      }
    }
    run(std::integral_constant<int, kScale>());
  });
}

void copy_two(const void* one, const void* other, void* out, std::int64_t bytes,
              cudaStream_t stream) {
  copy_two_kernel<<<blocks_for(bytes / 2), kThreads, 0, stream>>>(
      static_cast<const std::uint16_t*>(one), static_cast<const std::uint16_t*>(other),
      static_cast<std::uint16_t*>(out), bytes / 2);
}

std::int64_t parts_of(const ChannelBlocks& blocks) {
  // Enough blocks of threads for the largest device, each with enough to do.
  constexpr std::int64_t kBlocks = 2048;
  constexpr std::int64_t kLeast = 16 * kThreads;  // elements a block
  const std::int64_t columns =
      blocks.inner == 1 ? (blocks.channels + kWarp - 1) / kWarp : blocks.channels;
  const std::int64_t wanted = (kBlocks + columns - 1) / columns;
  const std::int64_t column = blocks.outer * blocks.inner * (blocks.inner == 1 ? kWarp : 1);
  const std::int64_t filled = (column + kLeast - 1) / kLeast;
  const std::int64_t parts = wanted < filled ? wanted : filled;
  const std::int64_t most = blocks.outer < 1024 ? blocks.outer : 1024;
  return parts < 1 ? 1 : parts < most ? parts : most;
}

void normalise_backward(Number type, const ChannelNorm& norm, const void* grad, const void* in,
                        void* sums, void* grad_in, void* grad_weight, void* grad_bias,
                        const ChannelBlocks& blocks, cudaStream_t stream) {
  with_types(type, norm.params, [&](auto t, auto p) {
    launch_backward<typename decltype(t)::Element, typename decltype(p)::Element>(
        norm, grad, in, sums, grad_in, grad_weight, grad_bias, blocks, stream);
  });
}

}  // namespace brim::nn::cuda
