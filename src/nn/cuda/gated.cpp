#include "nn/cuda/gated.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "nn/cuda/tensors.h"

// The operators of ops/gated_kernels.cpp on CUDA. Whoever calls has checked types and strides.

namespace brim::nn::cuda {
namespace {

Rows rows_of(const at::Tensor& matrix) { return {matrix.const_data_ptr(), matrix.stride(0)}; }

MutableRows mutable_rows_of(const MaybeTensor& matrix) {
  return is_given(matrix) ? MutableRows{matrix->mutable_data_ptr(), matrix->stride(0)}
                          : MutableRows{nullptr, 0};
}

at::Tensor gated_op(const at::Tensor& gate, const at::Tensor& up, std::string_view activation) {
  const Number type = number_of(gate, "brim::gated");
  at::Tensor output = at::empty(gate.sizes(), gate.options());
  launch_on(gate, [&](cudaStream_t stream) {
    gated(type, activation, rows_of(gate), rows_of(up), output.mutable_data_ptr(), gate.size(0),
          gate.size(1), stream);
  });
  return output;
}

void gated_grads_op(const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& up,
                    std::string_view activation, const MaybeTensor& grad_gate,
                    const MaybeTensor& grad_up) {
  const Number type = number_of(gate, "brim::gated");
  launch_on(gate, [&](cudaStream_t stream) {
    gated_grads(type, activation, grad.const_data_ptr(), rows_of(gate), rows_of(up),
                mutable_rows_of(grad_gate), mutable_rows_of(grad_up), gate.size(0), gate.size(1),
                stream);
  });
}

at::Tensor activate_op(const at::Tensor& input, std::string_view activation, bool wide) {
  const Number type = number_of(input, "brim::activation");
  at::Tensor output =
      at::empty_like(input, input.options().dtype(wide ? at::kFloat : input.scalar_type()));
  launch_on(input, [&](cudaStream_t stream) {
    activate(type, wide, activation, input.const_data_ptr(), output.mutable_data_ptr(),
             input.numel(), stream);
  });
  return output;
}

at::Tensor activate_grads_op(const at::Tensor& grad, const at::Tensor& input,
                             std::string_view activation) {
  const Number type = number_of(input, "brim::activation");
  at::Tensor result = at::empty_like(input);
  launch_on(input, [&](cudaStream_t stream) {
    activate_grads(type, grad.scalar_type() != input.scalar_type(), activation,
                   grad.const_data_ptr(), input.const_data_ptr(), result.mutable_data_ptr(),
                   input.numel(), stream);
  });
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(brim, CUDA, m) {
  m.impl("gated_rows", gated_op);
  m.impl("gated_rows_grads", gated_grads_op);
  m.impl("activate", activate_op);
  m.impl("activate_grads", activate_grads_op);
}

}  // namespace brim::nn::cuda
