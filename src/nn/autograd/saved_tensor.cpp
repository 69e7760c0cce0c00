#include "nn/autograd/saved_tensor.h"

#include <torch/csrc/autograd/variable.h>

#include "nn/autograd/node.h"

namespace brim::nn {

bool Kept::freeze(const c10::SymInt& most) {
  if (frozen_.defined() || hooks_in_force() != nullptr) {
    return true;
  }
  at::Tensor tensor;
  try {
    tensor = saved_.unpack();
  } catch (const c10::Error&) {  // another version than was kept
    return false;
  }
  if (tensor.defined()) {
    // FSDP takes the memory away until backward.
    const bool is_gone = tensor.has_storage() && !is_traced(tensor) && tensor.numel() > 0 &&
                         tensor.storage().nbytes() == 0;
    if (is_gone || tensor.sym_numel() > most) {
      return false;
    }
    if (tensor.requires_grad()) {
      edge_ = torch::autograd::impl::gradient_edge(tensor);
    }
    const BelowAutograd below;
    frozen_ = tensor.clone();
  }
  return true;
}

at::Tensor Kept::lend_frozen() const {
  if (!at::GradMode::is_enabled() || !edge_.is_valid()) {
    return frozen_;
  }
  at::Tensor tensor = without_history(frozen_);
  torch::autograd::impl::set_gradient_edge(tensor, edge_);
  return tensor;
}

at::Tensor Kept::unpack(torch::autograd::Node* owner) {
  // Without its place in the graph: held here, it would hold its own node.
  return owner == nullptr ? saved_.unpack()
                          : without_history(saved_.unpack(compat::pointer_to(*owner)));
}

}  // namespace brim::nn
