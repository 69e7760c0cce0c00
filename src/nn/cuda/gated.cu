#include "nn/cuda/gated.h"

#include <stdexcept>
#include <string>

#include "nn/cuda/activations.cuh"
#include "nn/cuda/launch.cuh"

// Neighbouring threads have neighbouring packs of a row; blocks in y have rows.

namespace brim::nn::cuda {
namespace {

/// @tparam P the type of the values from a power on, see activations.cuh
template <class P, class T, class Activation>
__device__ P value_of(const Activation& activation, T x) {
  if constexpr (kHasPowers<Activation>) {
    return activation.template value<P>(x);
  } else {
    return activation.value(x);
  }
}

template <class T>
__device__ T product_of(T a, T b) {
  return narrow<T>(times(widen(a), widen(b)));
}

__device__ std::int64_t first_column(int pack) {
  return (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * pack;
}

template <class T, int kPack, class Activation>
__global__ void __launch_bounds__(kThreads)
    gated_kernel(Activation activation, Rows gate, Rows up, T* out, std::int64_t rows,
                 std::int64_t columns) {
  const std::int64_t column = first_column(kPack);
  if (column >= columns) {
    return;
  }
  for (std::int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    const auto x = load<T, kPack>(static_cast<const T*>(gate.data) + row * gate.stride + column);
    const auto y = load<T, kPack>(static_cast<const T*>(up.data) + row * up.stride + column);
    Pack<T, kPack> result;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      result.at[i] = product_of(value_of<T>(activation, x.at[i]), y.at[i]);
    }
    store(result, out + row * columns + column);
  }
}

template <class T, int kPack, class Activation>
__global__ void __launch_bounds__(kThreads)
    gated_grads_kernel(Activation activation, const T* grad, Rows gate, Rows up,
                       MutableRows grad_gate, MutableRows grad_up, std::int64_t rows,
                       std::int64_t columns) {
  const std::int64_t column = first_column(kPack);
  if (column >= columns) {
    return;
  }
  for (std::int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    const auto g = load<T, kPack>(grad + row * columns + column);
    const auto x = load<T, kPack>(static_cast<const T*>(gate.data) + row * gate.stride + column);
    if (grad_gate.data != nullptr) {
      const auto y = load<T, kPack>(static_cast<const T*>(up.data) + row * up.stride + column);
      Pack<T, kPack> result;
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        result.at[i] = activation.grad(product_of(g.at[i], y.at[i]), x.at[i]);
      }
      store(result, static_cast<T*>(grad_gate.data) + row * grad_gate.stride + column);
    }
    if (grad_up.data != nullptr) {
      Pack<T, kPack> result;
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        result.at[i] = product_of(g.at[i], value_of<T>(activation, x.at[i]));
      }
      store(result, static_cast<T*>(grad_up.data) + row * grad_up.stride + column);
    }
  }
}

template <class T, class P, int kPack, class Activation>
__global__ void __launch_bounds__(kThreads)
    activate_kernel(Activation activation, const T* in, P* out, std::int64_t n) {
  const std::int64_t first = first_column(kPack);
  if (first >= n) {
    return;
  }
  const auto x = load<T, kPack>(in + first);
  Pack<P, kPack> result;
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    result.at[i] = value_of<P>(activation, x.at[i]);
  }
  store(result, out + first);
}

template <class T, class P, int kPack, class Activation>
__global__ void __launch_bounds__(kThreads)
    activate_grads_kernel(Activation activation, const P* grad, const T* in, T* grad_in,
                          std::int64_t n) {
  const std::int64_t first = first_column(kPack);
  if (first >= n) {
    return;
  }
  const auto g = load<P, kPack>(grad + first);
  const auto x = load<T, kPack>(in + first);
  Pack<T, kPack> result;
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    result.at[i] = activation.grad(g.at[i], x.at[i]);
  }
  store(result, grad_in + first);
}

// -- Launches ------------------------------------------------------------------------------------

/// Activations that only the kernels without a gate are called with have a kernel in torch.
template <class Run>
void with_written_out(std::string_view name, const Run& run) {
  if (name == "new_gelu") {
    run(NewGelu());
  } else if (name == "relu_squared") {
    run(ReluSquared());
  } else if (name == "quick_gelu") {
    run(QuickGelu{1.702});
  } else if (name == "swish") {
    run(QuickGelu{1.0});
  } else {
    throw std::invalid_argument("brim has no CUDA kernel for " + std::string(name));
  }
}

template <class Run>
void with_activation(std::string_view name, const Run& run) {
  if (name == "silu") {
    run(Silu());
  } else if (name == "gelu") {
    run(Gelu());
  } else if (name == "gelu_tanh") {
    run(GeluTanh());
  } else if (name == "relu") {
    run(Relu());
  } else if (name == "sigmoid") {
    run(Sigmoid());
  } else {
    with_written_out(name, run);
  }
}

/// Whether every row begins at the border of a pack.
template <class T, class AnyRows>
bool begins_aligned(const AnyRows& rows) {
  return is_aligned(rows.data) && rows.stride % kPackOf<T> == 0;
}

dim3 grid_of(std::int64_t rows, std::int64_t columns, int pack) {
  constexpr std::int64_t kMost = 65535;
  return dim3(blocks_for((columns + pack - 1) / pack),
              static_cast<unsigned>(rows < kMost ? rows : kMost));
}

/// Calls run(t, pack, function) for the type, the elements that a thread loads at once, and the
/// activation.
/// @param dense without gaps between its rows
template <class Run, class... AnyRows>
void with_gate(Number type, std::string_view activation, std::int64_t columns, const void* dense,
               const Run& run, const AnyRows&... rows) {
  with_type(type, [&](auto t) {
    using T = typename decltype(t)::Element;
    const bool packs =
        columns % kPackOf<T> == 0 && is_aligned(dense) && (begins_aligned<T>(rows) && ...);
    with_pack<T>(packs, [&](auto pack) {
      with_activation(activation, [&](auto function) { run(t, pack, function); });
    });
  });
}

/// Calls run(t, p, pack, function) for the types of the input and of the values from a power on.
/// @param pointers to `n` elements each
template <class Run, class... Pointers>
void without_gate(Number type, bool wide, std::string_view activation, std::int64_t n,
                  const Run& run, Pointers... pointers) {
  // What every type has in whole packs.
  const bool packs = n % 8 == 0 && (is_aligned(pointers, 32) && ...);
  with_type(type, [&](auto t) {
    using T = typename decltype(t)::Element;
    with_pack<T>(packs, [&](auto pack) {
      with_written_out(activation, [&](auto function) {
        if constexpr (sizeof(T) == 2 && kHasPowers<decltype(function)>) {
          if (wide) {
            return run(t, Type<float>(), pack, function);
          }
        }
        run(t, t, pack, function);
      });
    });
  });
}

}  // namespace

void gated(Number type, std::string_view activation, Rows gate, Rows up, void* out,
           std::int64_t rows, std::int64_t columns, cudaStream_t stream) {
  const auto run = [&](auto t, auto pack, auto function) {
    using T = typename decltype(t)::Element;
    gated_kernel<T, pack><<<grid_of(rows, columns, pack), kThreads, 0, stream>>>(
        function, gate, up, static_cast<T*>(out), rows, columns);
  };
  with_gate(type, activation, columns, out, run, gate, up);
}

void gated_grads(Number type, std::string_view activation, const void* grad, Rows gate, Rows up,
                 MutableRows grad_gate, MutableRows grad_up, std::int64_t rows,
                 std::int64_t columns, cudaStream_t stream) {
  const auto run = [&](auto t, auto pack, auto function) {
    using T = typename decltype(t)::Element;
    gated_grads_kernel<T, pack><<<grid_of(rows, columns, pack), kThreads, 0, stream>>>(
        function, static_cast<const T*>(grad), gate, up, grad_gate, grad_up, rows, columns);
  };
  with_gate(type, activation, columns, grad, run, gate, up, grad_gate, grad_up);
}

void activate(Number type, bool wide, std::string_view activation, const void* in, void* out,
              std::int64_t n, cudaStream_t stream) {
  const auto run = [&](auto t, auto p, auto pack, auto function) {
    using T = typename decltype(t)::Element;
    using P = typename decltype(p)::Element;
    activate_kernel<T, P, pack><<<grid_of(1, n, pack), kThreads, 0, stream>>>(
        function, static_cast<const T*>(in), static_cast<P*>(out), n);
  };
  without_gate(type, wide, activation, n, run, in, out);
}

void activate_grads(Number type, bool wide, std::string_view activation, const void* grad,
                    const void* in, void* grad_in, std::int64_t n, cudaStream_t stream) {
  const auto run = [&](auto t, auto p, auto pack, auto function) {
    using T = typename decltype(t)::Element;
    using P = typename decltype(p)::Element;
    activate_grads_kernel<T, P, pack><<<grid_of(1, n, pack), kThreads, 0, stream>>>(
        function, static_cast<const P*>(grad), static_cast<const T*>(in), static_cast<T*>(grad_in),
        n);
  };
  without_gate(type, wide, activation, n, run, grad, in, grad_in);
}

}  // namespace brim::nn::cuda
