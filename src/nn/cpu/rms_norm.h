#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "nn/autograd/optional_tensor.h"

namespace brim::nn::cpu {

/// Gradients of the input and of the weight of an RMS norm over the last `dims` dimensions; those
/// that are not asked for are undefined. No derivative of its own.
/// @param rstd one value per row, in the type that the input calculates in
std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad,
                                                     const at::Tensor& input,
                                                     const at::Tensor& rstd,
                                                     const MaybeTensor& weight, std::int64_t dims,
                                                     bool input_grad, bool weight_grad);

}  // namespace brim::nn::cpu
