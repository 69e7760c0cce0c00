#pragma once

#include <ATen/core/Tensor.h>

namespace brim::nn {

/// Whether a tensor is a part of a larger one: keeping it keeps all of that memory, and a copy
/// would be smaller.
[[nodiscard]] inline bool pins_more_than_itself(const at::Tensor& tensor) {
  return tensor.has_storage() && !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() &&
         tensor.storage().nbytes() > tensor.nbytes();
}

}  // namespace brim::nn
