#include "nn/cuda/pool.h"

#include <torch/library.h>

#include "nn/cuda/tensors.h"
#include "nn/ops/max_pool_kernels.h"

// The operators of ops/max_pool.cpp and ops/avg_pool.cpp on CUDA.

namespace brim::nn::cuda {
namespace {

void pack(const at::Tensor& input, at::Tensor& output, at::Tensor& offsets,
          const PoolGeometry& geometry) {
  const Number type = number_of(input, "brim::max_pool_pack");
  launch_on(input, [&](cudaStream_t stream) {
    max_pool_pack(type, input.const_data_ptr(), output.mutable_data_ptr(),
                  offsets.mutable_data_ptr<std::uint8_t>(), geometry, stream);
  });
}

void scatter(const at::Tensor& grad, const at::Tensor& offsets, at::Tensor& grad_input,
             const PoolGeometry& geometry) {
  const Number type = number_of(grad, "brim::max_pool_scatter");
  launch_on(grad, [&](cudaStream_t stream) {
    max_pool_scatter(type, grad.const_data_ptr(), offsets.const_data_ptr<std::uint8_t>(),
                     grad_input.mutable_data_ptr(), geometry, stream);
  });
}

at::Tensor avg_backward(const at::Tensor& grad, const std::optional<PoolWindow>& window,
                        std::size_t dims, c10::SymIntArrayRef input_sizes, bool channels_last,
                        const AvgRule& rule) {
  const Number type = number_of(grad, "brim::avg_pool_backward");
  const at::IntArrayRef sizes = C10_AS_INTARRAYREF_SLOW(input_sizes);
  const at::Tensor source = in_order(grad, channels_last);
  at::Tensor grad_input = empty_in_order(sizes, channels_last, grad.options());
  launch_on(grad_input, [&](cudaStream_t stream) {
    avg_pool_backward(type, source.const_data_ptr(), grad_input.mutable_data_ptr(),
                      geometry_of(window, dims, sizes, grad.sizes(), channels_last), rule, stream);
  });
  return grad_input;
}

at::Tensor avg_backward_op(const at::Tensor& grad, c10::SymIntArrayRef input_sizes,
                           at::IntArrayRef numbers, bool /*ceil_mode*/, bool count_include_pad,
                           std::optional<std::int64_t> divisor, bool channels_last) {
  const PoolWindow window(numbers);
  return avg_backward(grad, window, window.dims(), input_sizes, channels_last,
                      {false, count_include_pad, divisor.value_or(0)});
}

at::Tensor adaptive_backward_op(const at::Tensor& grad, c10::SymIntArrayRef input_sizes,
                                std::int64_t dims, bool channels_last) {
  return avg_backward(grad, {}, static_cast<std::size_t>(dims), input_sizes, channels_last,
                      {true, true, 0});
}

}  // namespace

TORCH_LIBRARY_IMPL(brim, CUDA, m) {
  m.impl("max_pool_pack", max_pool_pack_with<pack>);
  m.impl("max_pool_scatter", max_pool_scatter_with<scatter>);
  m.impl("avg_pool_backward", avg_backward_op);
  m.impl("adaptive_avg_pool_backward", adaptive_backward_op);
}

}  // namespace brim::nn::cuda
