#pragma once

#include <ATen/core/Tensor.h>
#include <brim/export.h>

namespace brim::nn {

/// Decides which of the tensors that only Python knows (classes written in Python, tensors inside
/// of torch.func.grad) brim's kernels take. torch's own operators run for the others, and for all
/// of them if no rule is set. brim's Python package sets one. Threads: a rule may be called from
/// any, with the GIL or without.
/// @param is_compiling whether a compiler traces these tensors: regions (brim/nn/saving.h) leave
///        torch's functions to it
BRIM_API void set_subclass_rule(bool (*is_known)(const at::Tensor&),
                                bool (*is_compiling)() = nullptr);

}  // namespace brim::nn
