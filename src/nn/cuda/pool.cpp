#include "nn/cuda/pool.h"

#include <torch/library.h>

#include "nn/cuda/tensors.h"
#include "nn/ops/avg_pool_kernels.h"
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

void avg_backward(const at::Tensor& grad, at::Tensor& grad_input, const PoolGeometry& geometry,
                  const AvgRule& rule) {
  const Number type = number_of(grad, "brim::avg_pool_backward");
  launch_on(grad_input, [&](cudaStream_t stream) {
    avg_pool_backward(type, grad.const_data_ptr(), grad_input.mutable_data_ptr(), geometry, rule,
                      stream);
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(brim, CUDA, m) {
  m.impl("max_pool_pack", max_pool_pack_with<pack>);
  m.impl("max_pool_scatter", max_pool_scatter_with<scatter>);
  m.impl("avg_pool_backward", avg_pool_backward_with<avg_backward>);
  m.impl("adaptive_avg_pool_backward", adaptive_backward_with<avg_backward>);
}

}  // namespace brim::nn::cuda
