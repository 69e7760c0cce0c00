#include "nn/cuda/batch_norm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <torch/library.h>

#include "nn/cuda/tensors.h"
#include "nn/ops/batch_norm_kernels.h"

// The operators of ops/batch_norm_kernels.cpp on CUDA. Whoever calls has checked the types.

namespace brim::nn::cuda {
namespace {

ChannelNorm channel_norm(const MaybeTensor& weight, const MaybeTensor& bias, const at::Tensor& mean,
                         const at::Tensor& spread, double eps) {
  return {.params = number_of(spread, "brim::batch_norm"),
          .weight = data_of(weight),
          .bias = data_of(bias),
          .mean = data_of(mean),
          .spread = data_of(spread),
          .eps = eps};
}

at::Tensor normalise_op(const at::Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias,
                        const at::Tensor& mean, const at::Tensor& spread, double eps,
                        std::int64_t formula, const MaybeTensor& added, bool relu) {
  const Number type = number_of(input, "brim::batch_norm");
  at::Tensor output = at::empty_like(input);
  launch_on(input, [&](cudaStream_t stream) {
    normalise(type, static_cast<int>(formula), channel_norm(weight, bias, mean, spread, eps),
              input.const_data_ptr(), data_of(added), relu, output.mutable_data_ptr(),
              blocks_of(input), stream);
  });
  return output;
}

at::Tensor copy_two_op(const at::Tensor& one, const at::Tensor& other) {
  at::Tensor both = at::empty({2 * one.numel()}, one.options());
  launch_on(one, [&](cudaStream_t stream) {
    copy_two(one.const_data_ptr(), other.const_data_ptr(), both.mutable_data_ptr(),
             static_cast<std::int64_t>(one.nbytes()), stream);
  });
  return both;
}

at::Tensor scale_channels_op(const at::Tensor& grad, const MaybeTensor& weight,
                             const at::Tensor& running_var, double eps) {
  return normalise_op(grad.contiguous(grad.suggest_memory_format()),
                      is_given(weight) ? weight->contiguous() : MaybeTensor(), {}, {},
                      running_var.contiguous(), eps, kScale, {}, false);
}

NormGrads eval_backward_op(const at::Tensor& grad, const at::Tensor& input,
                           const MaybeTensor& weight, const at::Tensor& running_mean,
                           const at::Tensor& running_var, double eps, std::array<bool, 3> wanted) {
  const Number type = number_of(input, "brim::batch_norm");
  const auto format = input.suggest_memory_format();
  const at::Tensor x = input.contiguous(format);
  const at::Tensor up = grad.contiguous(format);
  const ChannelBlocks blocks = blocks_of(x);
  const auto sums_as = x.options().dtype(type == Number::float64 ? at::kDouble : at::kFloat);
  at::Tensor sums = at::empty({parts_of(blocks), blocks.channels, 2}, sums_as);
  const at::Tensor grads = at::empty({2, blocks.channels}, sums_as);
  at::Tensor grad_input = wanted[0] ? at::empty_like(x) : at::Tensor();
  at::Tensor grad_weight = grads.select(0, 0);
  at::Tensor grad_bias = grads.select(0, 1);
  launch_on(x, [&](cudaStream_t stream) {
    normalise_backward(type, channel_norm(weight, {}, running_mean, running_var, eps),
                       up.const_data_ptr(), x.const_data_ptr(), sums.mutable_data_ptr(),
                       wanted[0] ? grad_input.mutable_data_ptr() : nullptr,
                       grad_weight.mutable_data_ptr(), grad_bias.mutable_data_ptr(), blocks,
                       stream);
  });
  const auto params = running_mean.scalar_type();
  return {grad_input, grad_weight.to(params), grad_bias.to(params)};
}

bool is_capturing_op(const at::Tensor& /*of*/) {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

}  // namespace

TORCH_LIBRARY_IMPL(brim, CUDA, m) {
  m.impl("batch_norm_normalise", normalise_op);
  m.impl("batch_norm_eval_backward", eval_backward_op);
  m.impl("copy_two", copy_two_op);
  m.impl("scale_channels", scale_channels_op);
  m.impl("is_capturing", is_capturing_op);
}

}  // namespace brim::nn::cuda
