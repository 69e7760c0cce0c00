#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
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

  /// From here on lend() gives the values of this moment, from a copy: by backward others may have
  /// written to the tensor, some without a new version (`.data`, running statistics). No copy under
  /// saved-tensor hooks, which hold the tensor in a way of their own.
  /// @param most elements that are worth a copy
  /// @returns false where it has more, and where it is too late: somebody has written to it
  /// already, or its memory is gone
  [[nodiscard]] bool freeze(const c10::SymInt& most);

  /// For a layer behind. Held from here on, until take() or the next backward call.
  [[nodiscard]] at::Tensor lend() {
    if (frozen_.defined()) {
      return lend_frozen();
    }
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
    frozen_.reset();
  }

 private:
  [[nodiscard]] at::Tensor lend_frozen() const;

  torch::autograd::SavedVariable saved_;
  ForThisBackward lent_;
  at::Tensor frozen_;
  torch::autograd::Edge edge_;  // where the frozen tensor is in the graph
};

}  // namespace brim::nn
