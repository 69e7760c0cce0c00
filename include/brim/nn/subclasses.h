#pragma once

#include <ATen/core/Tensor.h>
#include <brim/export.h>

namespace brim::nn {

/// Decides which tensors brim's kernels take of those that only Python knows: of classes written in
/// Python, and inside of torch.func.grad. torch's own operators do the work for the others, and for
/// all of them where no rule is set. brim's Python package sets one. Threads: a rule may be called
/// from any, with the GIL or without.
BRIM_API void set_subclass_rule(bool (*is_known)(const at::Tensor&));

}  // namespace brim::nn
