#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <optional>

// Weights that a layer may lack. An empty option and an undefined tensor both mean "none".

namespace brim::nn {

using MaybeTensor = std::optional<at::Tensor>;

[[nodiscard]] inline bool is_given(const MaybeTensor& tensor) {
  return tensor && tensor->defined();
}

[[nodiscard]] inline bool trains(const MaybeTensor& tensor) {
  return is_given(tensor) && tensor->requires_grad();
}

/// Undefined becomes an empty option.
[[nodiscard]] inline MaybeTensor maybe(const at::Tensor& tensor) {
  return tensor.defined() ? MaybeTensor(tensor) : MaybeTensor();
}

/// A reference for backward: an input of the layer, never its output.
[[nodiscard]] inline torch::autograd::SavedVariable kept(const MaybeTensor& tensor) {
  return is_given(tensor) ? torch::autograd::SavedVariable(*tensor, false)
                          : torch::autograd::SavedVariable();
}

}  // namespace brim::nn
