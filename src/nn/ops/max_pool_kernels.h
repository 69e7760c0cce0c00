#pragma once

#include <ATen/ops/empty_like.h>

#include <tuple>

#include "nn/ops/pool.h"

// Maximum pooling that keeps one byte per output: the place of the maximum in its window, counted
// row by row, padding included. Of equal values the first is taken; a NaN wins, the last of
// several. On each device the operators are these functions around a kernel, which gets dense
// tensors in the order that the geometry says.

namespace brim::nn {

/// The maxima, and their places (uint8, sizes and strides of the maxima).
/// @tparam Kernel (input, output, offsets, geometry)
template <auto Kernel>
std::tuple<at::Tensor, at::Tensor> max_pool_pack_with(const at::Tensor& input,
                                                      at::IntArrayRef numbers, bool ceil_mode) {
  const PoolWindow window(numbers);
  const bool channels_last = is_channels_last(input, window.dims());
  const auto sizes = pooled_sizes(input.sizes(), window, ceil_mode);
  at::Tensor output = empty_in_order(at::IntArrayRef(sizes), channels_last, input.options());
  at::Tensor offsets = at::empty_like(output, at::kByte);
  Kernel(in_order(input, channels_last), output, offsets,
         geometry_of(window, window.dims(), input.sizes(), sizes, channels_last));
  return {std::move(output), std::move(offsets)};
}

/// Adds `grad` to where the maxima came from: the gradient of the input, dense.
/// @tparam Kernel (grad, offsets, grad_input, geometry)
template <auto Kernel>
at::Tensor max_pool_scatter_with(const at::Tensor& grad, const at::Tensor& offsets,
                                 c10::SymIntArrayRef input_sizes, at::IntArrayRef numbers,
                                 bool channels_last) {
  const PoolWindow window(numbers);
  const at::IntArrayRef sizes = C10_AS_INTARRAYREF_SLOW(input_sizes);
  at::Tensor grad_input = empty_in_order(sizes, channels_last, grad.options());
  Kernel(in_order(grad, channels_last), in_order(offsets, channels_last), grad_input,
         geometry_of(window, window.dims(), sizes, offsets.sizes(), channels_last));
  return grad_input;
}

namespace cpu {

void max_pool_pack(const at::Tensor& input, at::Tensor& output, at::Tensor& offsets,
                   const PoolGeometry& geometry);
void max_pool_scatter(const at::Tensor& grad, const at::Tensor& offsets, at::Tensor& grad_input,
                      const PoolGeometry& geometry);

}  // namespace cpu
}  // namespace brim::nn
