#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <brim/adapt/saved_state.h>
#include <brim/memory/out_of_memory.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <ranges>
#include <utility>

namespace brim {
namespace {

/// Below what counts versions and refuses to write to a leaf that needs a gradient.
class BelowAutograd {
  const at::NoGradGuard no_grad_;
  const at::AutoDispatchBelowADInplaceOrView below_;
};

/// Not `tensor.grad()`, which warns of tensors that are no leaves.
const at::Tensor& gradient_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->grad();
}

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return !a.has_storage() || !b.has_storage() ||
         (a.storage().is_alias_of(b.storage()) && a.sizes() == b.sizes() &&
          a.strides() == b.strides() && a.storage_offset() == b.storage_offset());
}

std::exception_ptr error_of(const std::function<void()>& call) {
  try {
    call();
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

void require_gradient(const at::Tensor& tensor, bool required) {
  if (tensor.requires_grad() == required) {
    return;
  }
  if (tensor.is_leaf()) {
    tensor.set_requires_grad(required);
  } else if (!tensor.is_view()) {
    tensor.detach_();  // from what an attempt wrote to it
  }
}

}  // namespace

void SavedState::add(const at::Tensor& tensor) {
  add_values(tensor);
  add_gradient(tensor);
}

void SavedState::add_values(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.defined(), "restore has an undefined tensor");
  if (!values_.contains(tensor.unsafeGetTensorImpl())) {
    const BelowAutograd guard;
    values_[tensor.unsafeGetTensorImpl()] = {tensor, tensor.alias(), at::clone(tensor),
                                             tensor.requires_grad()};
  }
}

void SavedState::add_gradient(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.defined(), "restore has an undefined tensor");
  if (!gradients_.contains(tensor.unsafeGetTensorImpl())) {
    const BelowAutograd guard;
    const at::Tensor& gradient = gradient_of(tensor);
    gradients_[tensor.unsafeGetTensorImpl()] = {tensor, gradient,
                                                gradient.defined() ? at::clone(gradient) : gradient,
                                                tensor.requires_grad()};
  }
}

void SavedState::add(std::function<void()> put_back) { others_.push_back(std::move(put_back)); }

void SavedState::put_back() const {
  for (const auto* saved : {&gradients_, &values_}) {
    for (const auto& [impl, each] : *saved) {
      require_gradient(each.tensor, each.required);
    }
  }
  for (const auto& [impl, gradient] : gradients_) {
    if (gradient.before.defined() || gradient_of(gradient.tensor).defined()) {
      gradient.tensor.unsafeGetTensorImpl()->mutable_grad() = gradient.before;
    }
  }
  for (const auto& [impl, values] : values_) {
    if (!same_memory(values.tensor, values.before)) {
      values.tensor.set_data(values.before);
    }
  }
  {
    const BelowAutograd guard;
    for (const auto& [impl, gradient] : gradients_) {
      if (gradient.before.defined()) {
        gradient.before.copy_(gradient.copy);
      }
    }
    for (const auto& [impl, values] : values_) {
      values.tensor.copy_(values.copy);
    }
  }
  std::exception_ptr first;
  for (const auto& other : others_) {
    // An interrupt or a moment without memory may have stopped it anywhere: it runs again, and
    // whatever becomes of it, so do the others.
    if (const std::exception_ptr error = error_of(other)) {
      const std::exception_ptr again = error_of(other);
      if (!first && (again || !is_out_of_memory(error))) {
        first = error;
      }
    }
  }
  if (first) {
    std::rethrow_exception(first);
  }
}

bool SavedState::has_values(const at::Tensor& tensor) const {
  return std::ranges::any_of(std::views::values(values_), [&](const Saved& values) {
    return values.tensor.is_same(tensor) || (tensor.has_storage() && values.before.has_storage() &&
                                             tensor.storage().is_alias_of(values.before.storage()));
  });
}

}  // namespace brim
