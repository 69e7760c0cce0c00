#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "nn/cuda/bits.h"

// Normalisation of rows in float32, on plain pointers: functional::float32_rms_norm, and layer norm
// and group norm recomputed from the statistics that torch's kernels gave. See nn/cuda/bits.h for
// what holds for all kernels. Not for float64.

namespace brim::nn::cuda {

/// Rows that lie one after the other, and what they are multiplied by and added to.
struct NormRows {
  std::int64_t rows;
  std::int64_t size;   // elements of a row
  Number type;         // of the elements
  Number product;      // of the output and its gradient: `type` or float32
  Number weights;      // of weight and bias: `type` or float32
  const void* weight;  // null: none
  const void* bias;    // null: none; of layer norm and group norm
  float offset;        // added to each weight, in float32
  bool cast_first;     // rounded to `type` before the product
};

/// RMS norm. @param rstd what each row was multiplied by, an output
void normalise_rows(const NormRows& rows, const void* in, float eps, void* out, float* rstd,
                    cudaStream_t stream);

/// Layer norm from its statistics; `product` is any type, `weights` float32.
void normalise_rows_as(const NormRows& rows, const void* in, const float* mean, const float* rstd,
                       void* out, cudaStream_t stream);

/// Group norm from its statistics. A row is a channel of a sample, which has one weight and one
/// bias; `product` is any type.
/// @param channels of a sample
/// @param mean, rstd of each group of `channels_in_group` rows
void normalise_groups_as(const NormRows& rows, std::int64_t channels,
                         std::int64_t channels_in_group, const void* in, const float* mean,
                         const float* rstd, void* out, cudaStream_t stream);

/// Parts that the gradient of an RMS norm's weight is summed in, for the buffer below.
std::int64_t parts_of(const NormRows& rows);

/// Of an RMS norm. Sums are taken in float32, in a fixed order.
/// @param grad_in null: not wanted
/// @param sums [parts][rows.size]; null: the gradient of the weight is not wanted
/// @param grad_weight [rows.size], of type `weight_type`
void normalise_rows_backward(const NormRows& rows, const void* grad, const void* in,
                             const float* rstd, void* grad_in, float* sums, Number weight_type,
                             void* grad_weight, cudaStream_t stream);

}  // namespace brim::nn::cuda
