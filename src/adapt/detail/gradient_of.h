#pragma once

#include <ATen/core/Tensor.h>

namespace brim::detail {

/// The gradient of a tensor, to be changed. Not `tensor.mutable_grad()`, which warns of tensors
/// that are no leaves.
inline at::Tensor& gradient_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->mutable_grad();
}

}  // namespace brim::detail
