#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "nn/cuda/bits.h"

// Cross entropy on plain pointers; see nn/cuda/bits.h for what holds for all kernels.

namespace brim::nn::cuda {

/// A matrix of logits with one class number for each row. Elements of a row lie side by side.
struct Logits {
  Number type;
  Number working;  // of losses and their gradients: `type`, or float32 for half the width
  const void* data;
  std::int64_t rows;
  std::int64_t classes;
  std::int64_t stride;  // elements from one row to the next
  const std::int64_t* target;
  std::int64_t ignore_index;
};

/// The loss of each row, and the logarithm of its sum of exponentials (of the width that `type`
/// calculates in). Rows that are ignored get zeros and are not read.
/// @param losses null: not wanted
void cross_entropy_rows(const Logits& logits, void* losses, void* log_sums, cudaStream_t stream);

/// The gradient of the logits, without gaps. `result` may be `logits.data`.
/// @param grad of the working type: one per row, or a single one if `single`
/// @param total null, or what the gradient is divided by, of the working type
void cross_entropy_rows_backward(const Logits& logits, const void* log_sums, const void* grad,
                                 bool single, const void* total, void* result, cudaStream_t stream);

}  // namespace brim::nn::cuda
