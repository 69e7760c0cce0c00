#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <tuple>

#include "nn/ops/pool.h"

// Maximum pooling that keeps one byte an output: the place of the maximum in its window, counted
// row by row, padding included. Of equal values the first is taken; a NaN wins, the last of
// several.

namespace brim::nn {

/// The maxima, and their places (uint8, sizes and strides of the maxima).
std::tuple<at::Tensor, at::Tensor> max_pool_pack(const at::Tensor& input,
                                                 const PoolOptions& options, bool ceil_mode);

/// Adds `grad` to where the maxima came from: the gradient of the input, dense.
at::Tensor max_pool_scatter(const at::Tensor& grad, const at::Tensor& offsets,
                            c10::SymIntArrayRef input_sizes, const PoolOptions& options,
                            bool channels_last);

/// Places as torch writes them: int64, counted in the sample's channel.
at::Tensor max_pool_indices(const at::Tensor& offsets, c10::SymIntArrayRef input_sizes,
                            const PoolOptions& options, bool channels_last);

/// torch's own pooling of as many dimensions as `kernel_size` has numbers.
std::tuple<at::Tensor, at::Tensor> torch_max_pool_with_indices(
    const at::Tensor& input, at::IntArrayRef kernel_size, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool ceil_mode);

namespace cpu {

// All tensors are dense, in the order that the geometry says.
void max_pool_pack(const at::Tensor& input, at::Tensor& output, at::Tensor& offsets,
                   const PoolGeometry& geometry);
void max_pool_scatter(const at::Tensor& grad, const at::Tensor& offsets, at::Tensor& grad_input,
                      const PoolGeometry& geometry);
void max_pool_indices(const at::Tensor& offsets, at::Tensor& indices, const PoolGeometry& geometry);

}  // namespace cpu
}  // namespace brim::nn
