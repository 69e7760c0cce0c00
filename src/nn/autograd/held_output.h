#pragma once

#include "nn/autograd/node.h"
#include "nn/autograd/saved_tensor.h"

namespace brim::nn {

/// A layer that gives its output again while a layer after it keeps that output anyway: the same
/// memory, no byte more.
class OutputHoldingNode : public SavingNode {
 public:
  /// @param holds whether later layers may ask at all: to hold the output costs time
  explicit OutputHoldingNode(bool holds) : holds_(holds) {}

  void output_is_kept(const at::Tensor& output) override {
    if (!holds_ || hooks_in_force() != nullptr) {  // hooks may hold tensors elsewhere
      return;
    }
    const std::lock_guard lock(mutex_);
    held_ = Kept::output(output, false);
    is_held_ = true;
  }

  /// Nobody reads it in backward then but the layers that asked this one: the layer that kept it
  /// is not part of this backward, or autograd raises its error there.
  void output_is_overwritten(const at::Tensor& output) override {
    const std::lock_guard lock(mutex_);
    if (!is_held_) {
      return;
    }
    const BelowAutograd below;
    held_ = is_asked_ ? Kept(output.clone()) : Kept();
    is_held_ = is_asked_;
  }

  std::optional<int> layers_to_recompute() const override {
    return is_held_ ? std::optional(0) : std::nullopt;
  }

  bool prepare_to_recompute(bool /*copies*/) override {
    const std::lock_guard lock(mutex_);
    is_asked_ = is_asked_ || is_held_;
    return is_held_;
  }

  at::Tensor recompute() override {
    const std::lock_guard lock(mutex_);
    return held_output();
  }

  /// Before the last backward of this node, which does not read its output.
  void will_release_variables() override {
    const std::lock_guard lock(mutex_);
    held_.release();
  }

 protected:
  [[nodiscard]] bool is_held() const { return is_held_; }

  /// Under the lock. @throws c10::Error if it was written to or released.
  [[nodiscard]] at::Tensor held_output() { return held_.lend(this); }

 private:
  bool holds_;
  bool is_held_ = false;
  bool is_asked_ = false;
  Kept held_;
};

}  // namespace brim::nn
