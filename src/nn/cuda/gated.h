#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string_view>

#include "nn/cuda/bits.h"

// The kernels of ops/gated.cpp on plain pointers. Kernels run on `stream`; the caller sets the
// device and checks for errors of the launch.

namespace brim::nn::cuda {

/// Rows of elements without gaps inside.
struct Rows {
  const void* data;
  std::int64_t stride;  // from row to row, in elements
};

struct MutableRows {
  void* data;  // null: not wanted
  std::int64_t stride;
};

/// out = act(gate) * up. `out` has no gaps.
void gated(Number type, std::string_view activation, Rows gate, Rows up, void* out,
           std::int64_t rows, std::int64_t columns, cudaStream_t stream);

/// @param grad of the product, without gaps
void gated_grads(Number type, std::string_view activation, const void* grad, Rows gate, Rows up,
                 MutableRows grad_gate, MutableRows grad_up, std::int64_t rows,
                 std::int64_t columns, cudaStream_t stream);

/// out = act(in), of `n` elements.
/// @param wide for new_gelu and relu_squared of half types: `out` is float32, because autocast runs
///        powers in that type
void activate(Number type, bool wide, std::string_view activation, const void* in, void* out,
              std::int64_t n, cudaStream_t stream);

/// @param grad of the output, in its type; `grad_in` has the type of `in`
void activate_grads(Number type, bool wide, std::string_view activation, const void* grad,
                    const void* in, void* grad_in, std::int64_t n, cudaStream_t stream);

}  // namespace brim::nn::cuda
