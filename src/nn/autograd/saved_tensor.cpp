#include "nn/autograd/saved_tensor.h"

#include <ATen/ops/cat.h>
#include <brim/memory/out_of_memory.h>
#include <torch/csrc/autograd/variable.h>

#include "nn/autograd/node.h"

namespace brim::nn {
namespace {

/// Whether both halves of the copy are as well aligned as a copy of each would be: kernels choose
/// by that how they sum.
bool fit_in_one_copy(const at::Tensor& one, const at::Tensor& other) {
  constexpr std::int64_t kAlignment = 64;
  return one.defined() && other.defined() && one.is_cuda() && !is_traced(one) && one.dim() > 0 &&
         one.sizes() == other.sizes() && one.dtype() == other.dtype() &&
         one.device() == other.device() && one.nbytes() % kAlignment == 0;
}

}  // namespace

bool Kept::needs_copy() const { return !is_frozen_ && hooks_in_force() == nullptr; }

/// The tensor, which may be undefined; nothing if it cannot be copied.
std::optional<at::Tensor> Kept::to_copy(const c10::SymInt& most) const {
  at::Tensor tensor;
  try {
    tensor = saved_.unpack();
  } catch (const c10::Error& error) {
    if (is_out_of_memory(error)) {
      throw;
    }
    return std::nullopt;  // another version than was kept
  }
  // FSDP takes the memory away until backward.
  const bool is_gone = tensor.defined() && tensor.has_storage() && !is_traced(tensor) &&
                       tensor.numel() > 0 && tensor.storage().nbytes() == 0;
  const bool is_small = !tensor.defined() || tensor.sym_numel() <= most;
  return is_small && !is_gone ? std::optional(std::move(tensor)) : std::nullopt;
}

void Kept::set_frozen(const at::Tensor& tensor, const at::Tensor& copy) {
  if (tensor.requires_grad()) {
    edge_ = torch::autograd::impl::gradient_edge(tensor);
  }
  frozen_ = torch::autograd::SavedVariable(copy, false);
  is_frozen_ = true;
}

bool Kept::is_there() {
  if (hooks_in_force() != nullptr) {
    return true;
  }
  try {
    return lend().defined();
  } catch (const c10::Error& error) {
    if (is_out_of_memory(error)) {
      throw;
    }
    return false;
  }
}

bool Kept::freeze(const c10::SymInt& most) {
  if (!needs_copy()) {
    return true;
  }
  const auto tensor = to_copy(most);
  if (tensor && tensor->defined()) {
    const BelowAutograd below;
    set_frozen(*tensor, tensor->clone());
  }
  return tensor.has_value();
}

bool Kept::freeze(Kept& first, Kept& second, const c10::SymInt& most) {
  const auto one = first.needs_copy() ? first.to_copy(most) : std::nullopt;
  const auto other = one && second.needs_copy() ? second.to_copy(most) : std::nullopt;
  if (!other || !fit_in_one_copy(*one, *other)) {
    return first.freeze(most) && second.freeze(most);
  }
  const BelowAutograd below;
  const at::Tensor both = at::cat({*one, *other});
  first.set_frozen(*one, both.narrow(0, 0, one->size(0)));
  second.set_frozen(*other, both.narrow(0, one->size(0), one->size(0)));
  return true;
}

at::Tensor Kept::lend_frozen() const { return with_history(frozen_.unpack(), edge_); }

at::Tensor Kept::unpack(torch::autograd::Node* owner) {
  // Without its place in the graph: held here, it would hold its own node.
  return owner == nullptr ? saved_.unpack()
                          : without_history(saved_.unpack(compat::pointer_to(*owner)));
}

}  // namespace brim::nn
