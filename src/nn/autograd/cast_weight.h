#pragma once

#include "nn/autograd/node.h"
#include "nn/autograd/optional_tensor.h"

namespace brim::nn {

/// Which a layer keeps: its weight, or the parameter that autocast cast that from, to cast it again
/// in backward. For a trained weight that takes more time than torch's layer, so it is left to
/// `recompute`, and to copies that count beside the input.
[[nodiscard]] inline at::Tensor weight_to_keep(const at::Tensor& input, const at::Tensor& weight,
                                               const MaybeTensor& parameter, bool recompute) {
  constexpr int kMuchLess = 16;
  const bool casts_again =
      is_given(parameter) &&
      (!weight.requires_grad() ||
       (recompute && (is_traced(input) || kMuchLess * weight.numel() >= input.numel())));
  return casts_again ? *parameter : weight;
}

/// `tensor` in the type of the layer's input.
[[nodiscard]] inline at::Tensor in_type(const at::Tensor& tensor, at::ScalarType type) {
  return tensor.scalar_type() == type ? tensor : tensor.to(type);
}

}  // namespace brim::nn
