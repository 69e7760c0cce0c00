#include "nn/cuda/row_norm.cuh"

// Layer norm and group norm recomputed from their statistics.

namespace brim::nn::cuda {
namespace {

/// Rounds as torch's layer norm and a copy do.
template <int kSize, class T, class O>
__global__ void __launch_bounds__(kThreads)
    rows_as_kernel(const T* __restrict__ in, O* __restrict__ out, const float* __restrict__ means,
                   const float* __restrict__ rstds, const Factors<float> factors,
                   const Factors<float> bias, const std::int64_t rows, const unsigned size) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= rows) {
    return;
  }
  const float mean = means[row];
  const float rstd = rstds[row];
  for (unsigned i = threadIdx.x * kSize; i < size; i += blockDim.x * kSize) {
    const auto values = load_wide<kSize>(in + row * size + i);
    const auto factor = factors.template load_at<kSize>(i);
    const auto moved = bias.template load_at<kSize>(i);
    Pack<float, kSize> result;
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      const float normal = __fmul_rn(__fsub_rn(values.at[k], mean), rstd);
      result.at[k] = __fmaf_rn(normal, factor.at[k], moved.at[k]);
    }
    store_narrow(result, out + row * size + i);
  }
}

/// Rounds as torch's group norm does, and a copy.
template <int kSize, class T, class O>
__global__ void __launch_bounds__(kThreads)
    groups_as_kernel(const T* __restrict__ in, O* __restrict__ out, const float* __restrict__ means,
                     const float* __restrict__ rstds, const float* __restrict__ weight,
                     const float* __restrict__ bias, const unsigned channels,
                     const unsigned channels_in_group, const std::int64_t rows,
                     const unsigned size) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= rows) {
    return;
  }
  const std::int64_t group = row / channels_in_group;
  const std::int64_t channel = row % channels;
  const float factor = weight == nullptr ? rstds[group] : __fmul_rn(rstds[group], weight[channel]);
  const float moved =
      __fsub_rn(bias == nullptr ? 0 : bias[channel], __fmul_rn(factor, means[group]));
  for (unsigned i = threadIdx.x * kSize; i < size; i += blockDim.x * kSize) {
    auto values = load_wide<kSize>(in + row * size + i);
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      values.at[k] = __fmaf_rn(values.at[k], factor, moved);
    }
    store_narrow(values, out + row * size + i);
  }
}

/// Calls run(in, out, pack, threads), with the pointers' types.
template <class Run>
void with_rows(const NormRows& rows, const void* in, void* out, const Run& run) {
  with_float(rows.type, [&](auto t) {
    with_float(rows.product, [&](auto o) {
      using T = typename decltype(t)::Element;
      using O = typename decltype(o)::Element;
      const auto run_with = [&](auto pack, const dim3& threads) {
        run(static_cast<const T*>(in), static_cast<O*>(out), pack, threads);
      };
      with_threads<T>(rows, run_with, in, out);
    });
  });
}

}  // namespace

void normalise_rows_as(const NormRows& rows, const void* in, const float* mean, const float* rstd,
                       void* out, cudaStream_t stream) {
  with_rows(rows, in, out, [&](auto* from, auto* to, auto pack, const dim3& threads) {
    rows_as_kernel<decltype(pack)::value><<<blocks_of(rows, threads), threads, 0, stream>>>(
        from, to, mean, rstd, factors_of<float>(rows), bias_of<float>(rows), rows.rows,
        static_cast<unsigned>(rows.size));
  });
}

void normalise_groups_as(const NormRows& rows, std::int64_t channels,
                         std::int64_t channels_in_group, const void* in, const float* mean,
                         const float* rstd, void* out, cudaStream_t stream) {
  with_rows(rows, in, out, [&](auto* from, auto* to, auto pack, const dim3& threads) {
    groups_as_kernel<decltype(pack)::value><<<blocks_of(rows, threads), threads, 0, stream>>>(
        from, to, mean, rstd, static_cast<const float*>(rows.weight),
        static_cast<const float*>(rows.bias), static_cast<unsigned>(channels),
        static_cast<unsigned>(channels_in_group), rows.rows, static_cast<unsigned>(rows.size));
  });
}

}  // namespace brim::nn::cuda
