#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "nn/cuda/bits.h"

// The RMS norm of functional::float32_rms_norm on plain pointers; see nn/cuda/bits.h for what holds
// for all kernels. Not for float64.

namespace brim::nn::cuda {

/// Rows that lie one behind the other, and what they are multiplied by.
struct RmsRows {
  std::int64_t rows;
  std::int64_t size;   // elements of a row
  Number type;         // of the elements
  Number product;      // of the output and its gradient: `type` or float32
  Number weights;      // `type` or float32
  const void* weight;  // null: none
  float offset;        // added to each weight, in float32
  bool cast_first;     // rounded to `type` before the product
};

/// @param rstd one number per row, an output
void rms_norm(const RmsRows& rows, const void* in, float eps, void* out, float* rstd,
              cudaStream_t stream);

/// Parts that the gradient of the weight is summed in, for the buffer below.
std::int64_t parts_of(const RmsRows& rows);

/// Sums are taken in float32, in a fixed order.
/// @param grad_in null: not wanted
/// @param sums [parts][size]; null: the weight's gradient is not wanted
/// @param grad_weight of type `weight_type`
void rms_norm_backward(const RmsRows& rows, const void* grad, const void* in, const float* rstd,
                       void* grad_in, float* sums, Number weight_type, void* grad_weight,
                       cudaStream_t stream);

}  // namespace brim::nn::cuda
