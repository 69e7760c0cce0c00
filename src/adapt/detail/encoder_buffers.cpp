#include "adapt/detail/encoder_buffers.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace brim::detail {
namespace {

bool same_values(const at::Tensor& a, const at::Tensor& b) {
  return at::equal(a, b) ||
         (a.is_floating_point() && a.sizes() == b.sizes() && at::allclose(a, b, 0, 0, true));
}

std::vector<at::Tensor> copies(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> result;
  result.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    result.push_back(tensor.detach().clone());
  }
  return result;
}

/// Writes what differs only: a buffer may be kept for a backward of the caller's.
void put(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& values) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!same_values(tensors[i], values[i])) {
      tensors[i].copy_(values[i]);
    }
  }
}

}  // namespace

EncoderBuffers::EncoderBuffers(const NamedTensors& named, const std::vector<at::Tensor>& carried)
    : named_(named),
      carried_(carried),
      at_first_(copies(named.tensors)),
      carried_at_first_(copies(carried)),
      before_(at_first_),
      after_(named.tensors.size()) {}

void EncoderBuffers::begin_encoder() {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < after_.size(); ++i) {
    before_[i] = after_[i].defined() ? after_[i] : before_[i];
  }
  starts_.push_back(before_);
  std::ranges::fill(after_, at::Tensor());
  is_first_ = true;
}

void EncoderBuffers::end_part() {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < after_.size(); ++i) {
    const at::Tensor& buffer = named_.tensors[i];
    const bool changed = !same_values(buffer, before_[i]);
    if (is_first_ && changed) {
      after_[i] = buffer.detach().clone();
    }
    TORCH_CHECK_VALUE(
        changed ? after_[i].defined() && same_values(buffer, after_[i]) : !after_[i].defined(),
        "encode changes the buffer ", named_.names[i],
        " by what its items are, so that no parts of a batch leave in it what the whole batch "
        "would: call eval() on the layer that has it");
    if (changed) {
      buffer.copy_(before_[i]);
      changes_ = true;
    }
  }
  is_first_ = false;
}

void EncoderBuffers::end_encoder() {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < after_.size(); ++i) {
    if (after_[i].defined()) {
      named_.tensors[i].copy_(after_[i]);
    }
  }
}

void EncoderBuffers::end_loss() {
  at_last_ = changes_ ? copies(named_.tensors) : std::vector<at::Tensor>();
  carried_at_last_ = copies(carried_);
}

void EncoderBuffers::begin_part_again(std::size_t encoder) {
  if (changes_) {
    put(named_.tensors, starts_[encoder]);
  }
}

void EncoderBuffers::refuse_changes(const char* function) const {
  for (std::size_t i = 0; i < at_first_.size(); ++i) {
    TORCH_CHECK_VALUE(same_values(named_.tensors[i], at_first_[i]), function,
                      " changes the buffer ", named_.names[i],
                      ", which would change again where a failure on another rank makes all ranks "
                      "repeat the step: with ranks, call eval() on the layer that has it");
  }
}

void EncoderBuffers::end() {
  put(named_.tensors, at_last_);
  put(carried_, carried_at_last_);
}

void EncoderBuffers::undo() const {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below;
  for (std::size_t i = 0; i < at_first_.size(); ++i) {
    named_.tensors[i].copy_(at_first_[i]);
  }
  for (std::size_t i = 0; i < carried_at_first_.size(); ++i) {
    carried_[i].copy_(carried_at_first_[i]);
  }
}

}  // namespace brim::detail
