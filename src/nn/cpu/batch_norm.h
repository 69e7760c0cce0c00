#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <functional>
#include <optional>
#include <tuple>

#include "nn/autograd/optional_tensor.h"

// What batch norm does faster than by torch's operators, on CUDA.

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

/// The output again in one pass, `added` to it if that is defined, and cut off below zero if
/// `relu`: bit for bit what the separate operators give, or nothing where that is not certain.
///
/// cuDNN rounds in one of several ways, depending on the shape. Which one is found out once for
/// every shape, by trying them beside `reference`, which runs torch's own forward.
std::optional<at::Tensor> batch_norm_again(const NormOf& norm, const at::Tensor& added, bool relu,
                                           const std::function<at::Tensor()>& reference);

/// Gradients of input, weight and bias with running statistics. On CUDA in one pass, with sums
/// in another order than torch's; elsewhere torch's own. Not differentiable.
/// @param wanted what is not wanted may be undefined
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_eval_backward(
    const at::Tensor& grad, const at::Tensor& input, const MaybeTensor& weight,
    const at::Tensor& running_mean, const at::Tensor& running_var, double eps,
    std::array<bool, 3> wanted);

}  // namespace brim::nn
