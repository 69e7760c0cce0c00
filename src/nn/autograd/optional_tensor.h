#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "nn/autograd/saved_tensor.h"

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
[[nodiscard]] inline Kept kept(const MaybeTensor& tensor) {
  return is_given(tensor) ? Kept(*tensor) : Kept();
}

}  // namespace brim::nn
