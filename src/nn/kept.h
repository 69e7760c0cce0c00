#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "nn/for_this_backward.h"

namespace brim::nn {

/// A tensor that a node keeps for its backward, and lends to layers behind it before that. Saved
/// tensors may be given out only once in a backward call: those of torch.utils.checkpoint say so,
/// and others may copy from the host each time. Used under the lock of its node.
class Kept {
 public:
  Kept() = default;

  /// @param tensor an input of the layer, or one that autograd does not know; never its output
  explicit Kept(const at::Tensor& tensor) : saved_(tensor, false) {}

  /// For a layer behind. Held from here on, until take() or the next backward call.
  [[nodiscard]] at::Tensor lend() {
    at::Tensor tensor = lent_.get();
    if (!tensor.defined()) {
      tensor = saved_.unpack();
      lent_.set(tensor);
    }
    return tensor;
  }

  /// For the node's own backward. @throws c10::Error after release().
  [[nodiscard]] at::Tensor take() {
    const at::Tensor tensor = lent_.get();
    lent_.reset();
    return tensor.defined() ? tensor : saved_.unpack();
  }

  void release() {
    saved_.reset_data();
    lent_.reset();
  }

 private:
  torch::autograd::SavedVariable saved_;
  ForThisBackward lent_;
};

}  // namespace brim::nn
