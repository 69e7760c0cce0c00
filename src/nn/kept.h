#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <utility>

namespace brim::nn {

/// A tensor that a node keeps for its backward, and lends to layers behind it before that. Saved
/// tensors may be given out only once: those of torch.utils.checkpoint say so, and others may copy
/// from the host each time. Used under the lock of its node.
class Kept {
 public:
  Kept() = default;

  /// @param tensor an input of the layer, or one that autograd does not know; never its output
  explicit Kept(const at::Tensor& tensor) : saved_(tensor, false) {}

  /// For a layer behind. Held from here on, until take().
  [[nodiscard]] at::Tensor lend() {
    if (!lent_.defined()) {
      lent_ = saved_.unpack();
    }
    return lent_;
  }

  /// For the node's own backward. @throws c10::Error after release().
  [[nodiscard]] at::Tensor take() {
    return lent_.defined() ? std::exchange(lent_, at::Tensor()) : saved_.unpack();
  }

  void release() {
    saved_.reset_data();
    lent_.reset();
  }

 private:
  torch::autograd::SavedVariable saved_;
  at::Tensor lent_;
};

}  // namespace brim::nn
