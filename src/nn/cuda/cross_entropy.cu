#undef NDEBUG  // as torch's kernels do, these refuse a target that is no class
#include <cassert>

#include "nn/cuda/cross_entropy.h"
#include "nn/cuda/launch.cuh"

// A row is read in packs of 16 bytes from its first aligned element on; what lies before and after
// is read one by one. Everything is calculated in float32 (float64 for float64).

namespace brim::nn::cuda {
namespace {

constexpr int kRowThreads = 512;  // at most, per row in forward
constexpr int kTurns = 4;         // packs that a thread loads before it works on them

/// The elements of a row in packs, and the others.
template <class T>
struct Row {
  std::int64_t head;  // elements before the first pack
  std::int64_t packs;
  std::int64_t others;  // elements in no pack

  /// @param aligned whether packs may be used at all
  __device__ Row(const T* row, std::int64_t classes, bool aligned) {
    const auto beyond = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(row) % 16);
    head = (16 - beyond) % 16 / static_cast<std::int64_t>(sizeof(T));
    packs = aligned && head < classes ? (classes - head) / kPackOf<T> : 0;
    others = classes - packs * kPackOf<T>;
  }

  /// The place of the one of `others` with number `i`.
  __device__ std::int64_t place(std::int64_t i) const {
    return i < head ? i : i + packs * kPackOf<T>;
  }
};

/// Sum of exponentials, in units of the largest one.
template <class W>
struct ExpSum {
  W largest = -INFINITY;
  W sum = 0;

  /// What is subtracted; not -inf, which would make NaN of it.
  __device__ W shift() const { return largest == -W(INFINITY) ? W(0) : largest; }

  __device__ void rise_to(W x) {
    const W before = largest;
    largest = x > largest ? x : largest;
    if (largest != before) {
      sum *= exp(before - shift());
    }
  }

  __device__ void add(W x) {
    rise_to(x);
    sum += exp(x - shift());
  }

  __device__ void merge(W other_largest, W other_sum) {
    ExpSum other{other_largest, other_sum};
    other.rise_to(largest);
    rise_to(other_largest);
    sum += other.sum;
  }
};

/// Of all threads of the block, in the first thread.
template <class W>
__device__ ExpSum<W> block_sum(ExpSum<W> own) {
  const auto warp_merge = [](ExpSum<W>& value) {
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      const W largest = __shfl_down_sync(0xffffffffU, value.largest, offset);
      const W sum = __shfl_down_sync(0xffffffffU, value.sum, offset);
      value.merge(largest, sum);
    }
  };
  __shared__ W largest[kRowThreads / kWarp];
  __shared__ W sums[kRowThreads / kWarp];
  warp_merge(own);
  if (threadIdx.x % kWarp == 0) {
    largest[threadIdx.x / kWarp] = own.largest;
    sums[threadIdx.x / kWarp] = own.sum;
  }
  __syncthreads();
  if (threadIdx.x < kWarp) {
    const bool is_one = threadIdx.x < blockDim.x / kWarp;
    own = is_one ? ExpSum<W>{largest[threadIdx.x], sums[threadIdx.x]} : ExpSum<W>{};
    warp_merge(own);
  }
  return own;
}

/// One block per row.
template <class T, class R>
__global__ void __launch_bounds__(kRowThreads)
    rows_kernel(const T* logits, std::int64_t stride, std::int64_t classes,
                const std::int64_t* targets, std::int64_t ignore_index, R* losses,
                Wide<T>* log_sums) {
  using W = Wide<T>;
  const std::int64_t target = targets[blockIdx.x];
  if (target == ignore_index) {
    if (threadIdx.x == 0) {
      log_sums[blockIdx.x] = 0;
      if (losses != nullptr) {
        losses[blockIdx.x] = narrow<R>(Wide<R>(0));
      }
    }
    return;
  }
  assert(target >= 0 && target < classes);
  const T* const from = logits + blockIdx.x * stride;
  const Row<T> row(from, classes, true);
  ExpSum<W> own;
  for (std::int64_t first = threadIdx.x; first < row.packs; first += blockDim.x * kTurns) {
    Pack<T, kPackOf<T>> packs[kTurns];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const std::int64_t pack = first + turn * blockDim.x;
      if (pack < row.packs) {
        packs[turn] = load<T, kPackOf<T>>(from + row.head + pack * kPackOf<T>);
      }
    }
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (first + turn * blockDim.x < row.packs) {
        W x[kPackOf<T>];
        W largest = -INFINITY;
#pragma unroll
        for (int i = 0; i < kPackOf<T>; ++i) {
          x[i] = widen(packs[turn].at[i]);
          largest = x[i] > largest ? x[i] : largest;
        }
        own.rise_to(largest);
        const W shift = own.shift();
#pragma unroll
        for (int i = 0; i < kPackOf<T>; ++i) {
          own.sum += exp(x[i] - shift);
        }
      }
    }
  }
  for (std::int64_t i = threadIdx.x; i < row.others; i += blockDim.x) {
    own.add(widen(from[row.place(i)]));
  }
  const ExpSum<W> all = block_sum(own);
  if (threadIdx.x == 0) {
    const W log_sum = log(all.sum);
    log_sums[blockIdx.x] = all.largest + log_sum;
    if (losses != nullptr) {
      losses[blockIdx.x] =
          narrow<R>(static_cast<Wide<R>>(log_sum - (widen(from[target]) - all.largest)));
    }
  }
}

/// Several blocks (`parts`) per row.
template <class T, class R>
__global__ void __launch_bounds__(kThreads)
    rows_backward_kernel(const T* logits, std::int64_t stride, std::int64_t classes,
                         const std::int64_t* targets, std::int64_t ignore_index,
                         const Wide<T>* log_sums, const R* grads, bool single, const R* total,
                         T* result, bool aligned, unsigned parts) {
  using W = Wide<T>;
  const std::int64_t at = blockIdx.x / parts;
  const unsigned part = blockIdx.x % parts;
  const std::int64_t target = targets[at];
  const bool is_ignored = target == ignore_index;
  const W grad = is_ignored ? W(0)
                            : static_cast<W>(widen(grads[single ? 0 : at])) /
                                  (total == nullptr ? W(1) : static_cast<W>(widen(*total)));
  const W log_sum = log_sums[at];
  const T* const from = logits + at * stride;
  T* const to = result + at * classes;
  const Row<T> row(from, classes, aligned);
  const auto gradient = [&](T logit, std::int64_t place) {
    if (is_ignored) {
      return narrow<T>(W(0));
    }
    const W value = exp(widen(logit) - log_sum) * grad;
    return narrow<T>(place == target ? value - grad : value);
  };
  const std::int64_t first = static_cast<std::int64_t>(part) * kThreads * kTurns + threadIdx.x;
  Pack<T, kPackOf<T>> packs[kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const std::int64_t pack = first + turn * kThreads;
    if (pack < row.packs && !is_ignored) {
      packs[turn] = load<T, kPackOf<T>>(from + row.head + pack * kPackOf<T>);
    }
  }
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const std::int64_t pack = first + turn * kThreads;
    if (pack < row.packs) {
      const std::int64_t place = row.head + pack * kPackOf<T>;
#pragma unroll
      for (int i = 0; i < kPackOf<T>; ++i) {
        packs[turn].at[i] = gradient(packs[turn].at[i], place + i);
      }
      store<kPackOf<T>>(packs[turn], to + place);
    }
  }
  for (std::int64_t i = static_cast<std::int64_t>(part) * kThreads + threadIdx.x; i < row.others;
       i += static_cast<std::int64_t>(parts) * kThreads) {
    const std::int64_t place = row.place(i);
    to[place] = gradient(from[place], place);
  }
}

}  // namespace

void cross_entropy_rows(const Logits& logits, void* losses, void* log_sums, cudaStream_t stream) {
  with_types(logits.type, logits.working, [&](auto type, auto working) {
    using T = typename decltype(type)::Element;
    using R = typename decltype(working)::Element;
    const std::int64_t wanted = logits.classes / kPackOf<T> / kWarp * kWarp;
    const auto threads = static_cast<unsigned>(
        wanted < kWarp ? kWarp : (wanted > kRowThreads ? kRowThreads : wanted));
    rows_kernel<T, R><<<static_cast<unsigned>(logits.rows), threads, 0, stream>>>(
        static_cast<const T*>(logits.data), logits.stride, logits.classes, logits.target,
        logits.ignore_index, static_cast<R*>(losses), static_cast<Wide<T>*>(log_sums));
  });
}

void cross_entropy_rows_backward(const Logits& logits, const void* log_sums, const void* grad,
                                 bool single, const void* total, void* result,
                                 cudaStream_t stream) {
  with_types(logits.type, logits.working, [&](auto type, auto working) {
    using T = typename decltype(type)::Element;
    using R = typename decltype(working)::Element;
    const auto distance =
        reinterpret_cast<std::uintptr_t>(logits.data) - reinterpret_cast<std::uintptr_t>(result);
    const bool aligned = distance % 16 == 0 && (logits.stride - logits.classes) % kPackOf<T> == 0;
    constexpr std::int64_t kPerBlock = static_cast<std::int64_t>(kThreads) * kTurns * kPackOf<T>;
    const auto parts = static_cast<unsigned>((logits.classes + kPerBlock - 1) / kPerBlock);
    rows_backward_kernel<T, R><<<static_cast<unsigned>(logits.rows) * parts, kThreads, 0, stream>>>(
        static_cast<const T*>(logits.data), logits.stride, logits.classes, logits.target,
        logits.ignore_index, static_cast<const Wide<T>*>(log_sums), static_cast<const R*>(grad),
        single, static_cast<const R*>(total), static_cast<T*>(result), aligned, parts);
  });
}

}  // namespace brim::nn::cuda
