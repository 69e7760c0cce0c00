#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "nn/autograd/for_this_backward.h"

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
  /// @throws c10::Error if there is no copy and its memory was taken away, as FSDP does with
  /// parameters.
  [[nodiscard]] at::Tensor lend() {
    if (frozen_.defined()) {
      return lend_frozen();
    }
    at::Tensor tensor = lent_.get();
    if (!tensor.defined()) {
      tensor = saved_.unpack();
      TORCH_CHECK(!tensor.defined() || !tensor.has_storage() || tensor.sym_numel() == 0 ||
                      tensor.storage().sym_nbytes() != 0,
                  "recompute=\"cheap\" reads the parameters of the layers before again in "
                  "backward, but FSDP has freed those of another unit: put a layer and the "
                  "normalisation and activation before it into one unit, or give fully_shard "
                  "reshard_after_forward=False");
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
