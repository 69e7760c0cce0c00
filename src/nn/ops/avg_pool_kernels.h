#pragma once

#include "nn/ops/pool.h"

// The backward of average pooling, which is linear: it needs the sizes of the input and nothing of
// its values. On each device the operators are these functions around a kernel
// (grad, grad_input, geometry, rule), which gets dense tensors in the order that the geometry says.

namespace brim::nn {

/// @param window none: the windows follow from the sizes
template <auto Kernel>
at::Tensor avg_backward_with(const at::Tensor& grad, c10::SymIntArrayRef input_sizes,
                             const std::optional<PoolWindow>& window, std::size_t dims,
                             bool channels_last, const AvgRule& rule) {
  const at::IntArrayRef sizes = C10_AS_INTARRAYREF_SLOW(input_sizes);
  at::Tensor grad_input = empty_in_order(sizes, channels_last, grad.options());
  Kernel(in_order(grad, channels_last), grad_input,
         geometry_of(window, dims, sizes, grad.sizes(), channels_last), rule);
  return grad_input;
}

/// Of brim::avg_pool_backward.
template <auto Kernel>
at::Tensor avg_pool_backward_with(const at::Tensor& grad, c10::SymIntArrayRef input_sizes,
                                  at::IntArrayRef numbers, bool /*ceil_mode*/,
                                  bool count_include_pad, std::optional<std::int64_t> divisor,
                                  bool channels_last) {
  const PoolWindow window(numbers);
  const AvgRule rule{false, count_include_pad, divisor.value_or(0)};
  return avg_backward_with<Kernel>(grad, input_sizes, window, window.dims(), channels_last, rule);
}

/// Of brim::adaptive_avg_pool_backward.
template <auto Kernel>
at::Tensor adaptive_backward_with(const at::Tensor& grad, c10::SymIntArrayRef input_sizes,
                                  std::int64_t dims, bool channels_last) {
  return avg_backward_with<Kernel>(grad, input_sizes, {}, static_cast<std::size_t>(dims),
                                   channels_last, {true, true, 0});
}

namespace cpu {

/// For few elements: one thread and no vectors.
void avg_pool_backward(const at::Tensor& grad, at::Tensor& grad_input, const PoolGeometry& geometry,
                       const AvgRule& rule);

}  // namespace cpu
}  // namespace brim::nn
