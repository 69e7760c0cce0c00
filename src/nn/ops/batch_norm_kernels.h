#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <functional>
#include <optional>

#include "nn/autograd/optional_tensor.h"
#include "nn/ops/channels.h"

// What batch norm does faster than torch's operators.

namespace brim::nn {

/// What the output of a batch norm followed from.
struct NormOf {
  at::Tensor input;
  MaybeTensor weight;
  MaybeTensor bias;
  at::Tensor mean;
  at::Tensor spread;  // 1 / standard deviation, or the variance where eps >= 0
  double eps = -1;    // below 0: `spread` is no variance
};

/// The output again in one pass on CUDA, plus `added` if that is defined, cut off below zero if
/// `relu`: bit for bit what the separate operators give, or nothing if that is not certain.
///
/// cuDNN rounds in one of several ways, depending on the shape. Which one is found out once for
/// every shape, by comparing them with `reference`, which runs torch's own forward.
std::optional<at::Tensor> batch_norm_again(const NormOf& norm, const at::Tensor& added, bool relu,
                                           const std::function<at::Tensor()>& reference);

/// Gradients of input, weight and bias with running statistics. On CUDA in one pass, with sums in
/// another order than torch's; elsewhere torch's own. Not differentiable.
/// @param wanted what is not wanted may be undefined
NormGrads batch_norm_eval_backward(const at::Tensor& grad, const at::Tensor& input,
                                   const MaybeTensor& weight, const at::Tensor& running_mean,
                                   const at::Tensor& running_var, double eps,
                                   std::array<bool, 3> wanted);

/// The input gradient with running statistics: `grad * invstd * weight`, where
/// `invstd = 1 / sqrt(running_var + eps)` of each channel. Channels are dimension 1. On the CPU the
/// same roundings as torch's native_batch_norm_backward. Differentiable in double backward only.
at::Tensor scale_channels(const at::Tensor& grad, const MaybeTensor& weight,
                          const at::Tensor& running_var, double eps);

}  // namespace brim::nn
