#include "nn/cuda/row_norm.cuh"

namespace brim::nn::cuda {
namespace {

constexpr std::size_t kShared = 47 * 1024;  // bytes; every device has 48 KiB for a block

/// The sum over the threads of a row, for all of them, always in the same order. All threads of
/// the block must call it.
__device__ float row_sum(float value) {
  const unsigned within = blockDim.x < kWarp ? blockDim.x : kWarp;
  for (unsigned mask = within / 2; mask > 0; mask /= 2) {
    value += __shfl_xor_sync(0xffffffffU, value, mask);
  }
  if (blockDim.x <= kWarp) {
    return value;
  }
  __shared__ float partial[kThreads / kWarp];
  const unsigned warps = blockDim.x / kWarp;
  const unsigned first = threadIdx.y * warps;
  __syncthreads();  // the last call's numbers were read
  if (threadIdx.x % kWarp == 0) {
    partial[first + threadIdx.x / kWarp] = value;
  }
  __syncthreads();
  float sum = 0;
  for (unsigned i = 0; i < warps; ++i) {
    sum += partial[first + i];
  }
  return sum;
}

/// Adds to numbers that belong to this thread.
template <int kSize>
__device__ void add_to(float* to, const Pack<float, kSize>& values) {
  constexpr int kLoad = kSize < kPackOf<float> ? kSize : kPackOf<float>;
#pragma unroll
  for (int k = 0; k < kSize; k += kLoad) {
    auto some = load<float, kLoad>(to + k);
#pragma unroll
    for (int i = 0; i < kLoad; ++i) {
      some.at[i] += values.at[k + i];
    }
    store<kLoad>(some, to + k);
  }
}

template <class T>
__device__ float rounded_to(float value) {
  return widen<T>(narrow<T>(value));
}

// -- Forward ----------------------------------------------------------------------------------

template <class T, class P, class O, int kSize>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const T* __restrict__ in, O* __restrict__ out, float* __restrict__ rstds,
                   const Factors<P> factors, const bool cast_first, const float eps,
                   const std::int64_t rows, const unsigned size) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool inside = row < rows;
  const T* const x = in + row * size;
  const unsigned begin = threadIdx.x * kSize;
  const unsigned end = inside ? size : 0;
  const unsigned step = blockDim.x * kSize;
  const float share = 1.0F / static_cast<float>(size);
  // The row is read twice: it is in the cache.
  float sum = 0;
  for (unsigned i = begin; i < end; i += step) {
    const auto values = load_wide<kSize>(x + i);
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      sum += values.at[k] * values.at[k];
    }
  }
  const float rstd = rsqrtf(__fadd_rn(__fmul_rn(row_sum(sum), share), eps));
  if (inside && threadIdx.x == 0) {
    rstds[row] = rstd;
  }
  for (unsigned i = begin; i < end; i += step) {
    const auto values = load_wide<kSize>(x + i);
    const auto factor = factors.template load_at<kSize>(i);
    Pack<float, kSize> result;
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      const float normal = __fmul_rn(values.at[k], rstd);
      result.at[k] = __fmul_rn(cast_first ? rounded_to<T>(normal) : normal, factor.at[k]);
    }
    store_narrow(result, out + row * size + i);
  }
}

// -- Backward ---------------------------------------------------------------------------------

/// Each block works on every gridDim.x-th group of rows. Its share of the weight's gradient is
/// summed in shared memory, or in its row of `sums` where that is too small; each place there
/// belongs to one thread until the end.
template <class T, class P, class O, int kSize>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const O* __restrict__ grad, const T* __restrict__ in,
                    const float* __restrict__ rstds, T* __restrict__ grad_in, float* const sums,
                    const bool in_shared, const Factors<P> factors, const bool cast_first,
                    const std::int64_t rows, const unsigned size) {
  extern __shared__ __align__(16) float shared[];
  float* const part = sums == nullptr ? nullptr : sums + std::int64_t{blockIdx.x} * size;
  float* const own = in_shared ? shared + threadIdx.y * size : part;
  const unsigned begin = threadIdx.x * kSize;
  const unsigned step = blockDim.x * kSize;
  if (part != nullptr) {
    for (unsigned i = begin; i < size; i += step) {
      for (int k = 0; k < kSize; ++k) {
        own[i + k] = 0;
      }
    }
  }
  const float share = 1.0F / static_cast<float>(size);
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.y;
  for (std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * blockDim.y; first < rows;
       first += stride) {
    const std::int64_t row = first + threadIdx.y;
    const bool inside = row < rows;
    const unsigned end = inside ? size : 0;
    const O* const g = grad + row * size;
    const T* const x = in + row * size;
    const float rstd = inside ? rstds[row] : 0;
    float dot = 0;  // of the normalised row and its gradient
    for (unsigned i = begin; i < end; i += step) {
      const auto up = load_wide<kSize>(g + i);
      const auto values = load_wide<kSize>(x + i);
      const auto factor = factors.template load_at<kSize>(i);
      Pack<float, kSize> of_weight;
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        const float normal = values.at[k] * rstd;
        const float of_normal = up.at[k] * factor.at[k];
        const float rounded = cast_first ? rounded_to<T>(of_normal) : of_normal;
        dot += rounded * normal;
        of_weight.at[k] = up.at[k] * (cast_first ? rounded_to<T>(normal) : normal);
      }
      if (part != nullptr) {
        add_to(own + i, of_weight);
      }
    }
    if (grad_in == nullptr) {
      continue;
    }
    const float along = row_sum(dot) * share;
    for (unsigned i = begin; i < end; i += step) {
      const auto up = load_wide<kSize>(g + i);
      const auto values = load_wide<kSize>(x + i);
      const auto factor = factors.template load_at<kSize>(i);
      Pack<float, kSize> result;
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        const float normal = values.at[k] * rstd;
        const float of_normal = up.at[k] * factor.at[k];
        const float rounded = cast_first ? rounded_to<T>(of_normal) : of_normal;
        result.at[k] = (rounded - normal * along) * rstd;
      }
      store_narrow(result, grad_in + row * size + i);
    }
  }
  if (part == nullptr || !in_shared) {
    return;
  }
  __syncthreads();
  for (unsigned i = threadIdx.y * blockDim.x + threadIdx.x; i < size; i += kThreads) {
    float total = 0;
    for (unsigned y = 0; y < blockDim.y; ++y) {
      total += shared[y * size + i];
    }
    part[i] = total;
  }
}

constexpr int kLines = 32;

/// The parts of each column, in a fixed order: kLines threads take every kLines-th part.
template <class W>
__global__ void __launch_bounds__(kWarp* kLines)
    finish_kernel(const float* __restrict__ sums, W* __restrict__ grad_weight, const unsigned parts,
                  const unsigned columns) {
  const unsigned column = blockIdx.x * kWarp + threadIdx.x;
  float sum = 0;
  if (column < columns) {
#pragma unroll 4
    for (unsigned part = threadIdx.y; part < parts; part += kLines) {
      sum += sums[std::uint64_t{part} * columns + column];
    }
  }
  __shared__ float lines[kLines][kWarp];
  lines[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && column < columns) {
    for (int i = 1; i < kLines; ++i) {
      sum += lines[i][threadIdx.x];
    }
    grad_weight[column] = narrow<W>(sum);
  }
}

// -- Launches ---------------------------------------------------------------------------------

/// Calls run(Type<T>(), Type<P>(), Type<O>()) for the types of elements, weights and product.
template <class Run>
void with_types(const NormRows& rows, const Run& run) {
  with_float(rows.type, [&](auto t) {
    if constexpr (!std::is_same_v<decltype(t), Type<float>>) {
      if (rows.weights != rows.type) {
        return rows.product == rows.type ? run(t, Type<float>(), t)
                                         : run(t, Type<float>(), Type<float>());
      }
    }
    run(t, t, t);
  });
}

}  // namespace

void normalise_rows(const NormRows& rows, const void* in, float eps, void* out, float* rstd,
                    cudaStream_t stream) {
  with_types(rows, [&](auto t, auto p, auto o) {
    using T = typename decltype(t)::Element;
    using P = typename decltype(p)::Element;
    using O = typename decltype(o)::Element;
    const auto run = [&](auto pack, const dim3& threads) {
      forward_kernel<T, P, O, decltype(pack)::value>
          <<<blocks_of(rows, threads), threads, 0, stream>>>(
              static_cast<const T*>(in), static_cast<O*>(out), rstd, factors_of<P>(rows),
              rows.cast_first, eps, rows.rows, static_cast<unsigned>(rows.size));
    };
    with_threads<T>(rows, run, in, out);
  });
}

std::int64_t parts_of(const NormRows& rows) {
  // Enough blocks for the largest device, but each with enough to do: a part is written and read.
  constexpr std::int64_t kMost = 512;
  constexpr std::int64_t kLeast = 8 * 1024;  // elements of a part
  const std::int64_t filled = rows.rows * rows.size / kLeast;
  const std::int64_t parts = filled < kMost ? filled : kMost;
  return parts < 1 ? 1 : parts < rows.rows ? parts : rows.rows;
}

void normalise_rows_backward(const NormRows& rows, const void* grad, const void* in,
                             const float* rstd, void* grad_in, float* sums, Number weight_type,
                             void* grad_weight, cudaStream_t stream) {
  const std::int64_t parts = parts_of(rows);
  const auto size = static_cast<unsigned>(rows.size);
  with_types(rows, [&](auto t, auto p, auto o) {
    using T = typename decltype(t)::Element;
    using P = typename decltype(p)::Element;
    using O = typename decltype(o)::Element;
    const auto run = [&](auto pack, const dim3& threads) {
      const std::size_t bytes = sizeof(float) * threads.y * size;
      const bool in_shared = sums != nullptr && bytes <= kShared;
      const auto blocks = sums == nullptr ? blocks_of(rows, threads) : static_cast<unsigned>(parts);
      backward_kernel<T, P, O, decltype(pack)::value>
          <<<blocks, threads, in_shared ? bytes : 0, stream>>>(
              static_cast<const O*>(grad), static_cast<const T*>(in), rstd,
              static_cast<T*>(grad_in), sums, in_shared, factors_of<P>(rows), rows.cast_first,
              rows.rows, size);
    };
    with_threads<T>(rows, run, grad, in, grad_in);
  });
  if (sums != nullptr) {
    with_type(weight_type, [&](auto w) {
      using W = typename decltype(w)::Element;
      finish_kernel<W><<<(size + kWarp - 1) / kWarp, dim3(kWarp, kLines), 0, stream>>>(
          sums, static_cast<W*>(grad_weight), static_cast<unsigned>(parts), size);
    });
  }
}

}  // namespace brim::nn::cuda
