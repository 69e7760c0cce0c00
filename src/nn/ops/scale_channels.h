#pragma once

#include <ATen/core/Tensor.h>

#include "nn/autograd/optional_tensor.h"

namespace brim::nn {

/// The input gradient of a batch norm with running statistics: `grad * invstd * weight`, where
/// `invstd = 1 / sqrt(running_var + eps)` of each channel. Channels are dimension 1. On the CPU the
/// same roundings as torch's native_batch_norm_backward. No derivative of its own.
at::Tensor scale_channels(const at::Tensor& grad, const MaybeTensor& weight,
                          const at::Tensor& running_var, double eps);

/// The same with ATen operators alone: any device, and differentiable.
at::Tensor scale_channels_anywhere(const at::Tensor& grad, const MaybeTensor& weight,
                                   const at::Tensor& running_var, double eps);

}  // namespace brim::nn
