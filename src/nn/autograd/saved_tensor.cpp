#include "nn/autograd/saved_tensor.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <brim/memory/out_of_memory.h>
#include <torch/csrc/autograd/variable.h>

#include <cstring>

#include "nn/autograd/node.h"
#include "nn/autograd/operator.h"

namespace brim::nn {
namespace {

/// Whether both halves of the copy are as well aligned as a copy of each would be (a line; the
/// widest load of a GPU): kernels choose by that how they sum.
bool fit_in_one_copy(const at::Tensor& one, const at::Tensor& other) {
  const auto is_plain = [](const at::Tensor& tensor) {
    return tensor.defined() && (tensor.key_set() | kKnownKeys) == kKnownKeys &&
           is_known_type(tensor.scalar_type()) && !is_traced(tensor) && !tensor.is_meta() &&
           tensor.is_contiguous();
  };
  return is_plain(one) && is_plain(other) && one.sizes() == other.sizes() &&
         one.dtype() == other.dtype() && one.device() == other.device() &&
         one.nbytes() % (one.is_cuda() ? 32 : 64) == 0;
}

at::Tensor copy_two_anywhere(const at::Tensor& one, const at::Tensor& other) {
  return at::cat({one.view(-1), other.view(-1)});
}

at::Tensor copy_two_cpu(const at::Tensor& one, const at::Tensor& other) {
  at::Tensor both = at::empty({2 * one.numel()}, one.options());
  auto* const to = static_cast<char*>(both.mutable_data_ptr());
  std::memcpy(to, one.const_data_ptr(), one.nbytes());
  std::memcpy(to + one.nbytes(), other.const_data_ptr(), one.nbytes());
  return both;
}

/// Both tensors, dense and of one size, one after the other.
const Operator<copy_two_anywhere> kCopyTwo("copy_two(Tensor one, Tensor other) -> Tensor",
                                           {.cpu = copy_two_cpu});

/// A part of what kCopyTwo gave. Without the dispatcher, which takes longer than the copy.
at::Tensor part_of(const at::Tensor& both, std::int64_t offset, const at::Tensor& like) {
  at::Tensor part = both.variable_data();
  part.unsafeGetTensorImpl()->set_storage_offset(offset);
  part.unsafeGetTensorImpl()->set_sizes_contiguous(like.sizes());
  return part;
}

}  // namespace

std::unique_ptr<Kept::InBlock> Kept::held_by_block(const at::Tensor& tensor, bool is_output) {
  if (block_here() == 0 || !tensor.defined() || hooks_in_force() != nullptr ||
      is_traced_by_others(tensor)) {
    return nullptr;
  }
  auto held = std::make_unique<InBlock>();
  held->value.emplace(Block::save(tensor));
  Block::stop_if_all_is_there();
  if (!is_output && tensor.requires_grad()) {
    held->edge = torch::autograd::impl::gradient_edge(tensor);
  }
  return held;
}

Kept::Kept(const at::Tensor& tensor) : in_block_(held_by_block(tensor, false)) {
  if (in_block_ == nullptr) {
    saved_ = torch::autograd::SavedVariable(tensor, false);
  }
}

Kept Kept::output(const at::Tensor& tensor, bool is_inplace_on_view) {
  Kept kept;
  kept.in_block_ = held_by_block(tensor, true);
  if (kept.in_block_ == nullptr) {
    kept.saved_ = torch::autograd::SavedVariable(tensor, true, is_inplace_on_view);
  }
  return kept;
}

at::Tensor Kept::unpack_saved() const {
  if (in_block_ == nullptr) {
    return saved_.unpack();
  }
  TORCH_CHECK(in_block_->value, torch::autograd::ERR_BACKWARD_TWICE);
  return in_block_->value->get();
}

/// A block holds tensors without their place. Not in unpack(): what is held for a whole backward
/// may be lent without gradients first, and taken with them then.
at::Tensor Kept::in_graph(const at::Tensor& unpacked) const {
  return in_block_ == nullptr ? unpacked : with_history(unpacked, in_block_->edge);
}

bool Kept::needs_copy() const { return !frozen_ && hooks_in_force() == nullptr; }

/// The tensor, which may be undefined; nothing if it cannot be copied.
std::optional<at::Tensor> Kept::to_copy(const c10::SymInt& most) const {
  at::Tensor tensor;
  try {
    tensor = in_graph(unpack_saved());
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

Kept::Frozen::Frozen(const at::Tensor& tensor, const at::Tensor& values) : copy(values, false) {
  if (tensor.requires_grad()) {
    edge = torch::autograd::impl::gradient_edge(tensor);
  }
}

at::Tensor Kept::Frozen::lend() const { return with_history(copy.unpack(), edge); }

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
    frozen_ = std::make_unique<Frozen>(*tensor, tensor->clone());
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
  const at::Tensor both = kCopyTwo(*one, *other);
  first.frozen_ = std::make_unique<Frozen>(*one, part_of(both, 0, *one));
  second.frozen_ = std::make_unique<Frozen>(*other, part_of(both, one->numel(), *other));
  return true;
}

at::Tensor Kept::unpack(torch::autograd::Node* owner) {
  if (owner == nullptr || in_block_ != nullptr) {
    return unpack_saved();
  }
  // Without its place in the graph: held here, it would hold its own node.
  return without_history(saved_.unpack(compat::pointer_to(*owner)));
}

}  // namespace brim::nn
