#pragma once

#include <ATen/core/Tensor.h>
#include <brim/nn/block.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <optional>

#include "nn/autograd/for_this_backward.h"

namespace brim::nn {

/// A tensor that a node keeps for its backward, and lends to later layers before that. It is
/// unpacked only once per backward call: torch.utils.checkpoint allows no more, and other hooks may
/// copy from the host each time. Used under the lock of its node.
class Kept {
 public:
  Kept() = default;

  /// @param tensor an input of the layer, or one that autograd does not know; never its output
  explicit Kept(const at::Tensor& tensor);

  /// The node's own output, once it is in the graph. lend() and take() are then told the node, and
  /// lend() gives the output without its place in the graph.
  [[nodiscard]] static Kept output(const at::Tensor& tensor, bool is_inplace_on_view);

  /// From here on lend() returns the values of this moment, from a copy: the tensor may be written
  /// to before backward, even without a new version (`.data`, running statistics). No copy under
  /// saved-tensor hooks, which hold the tensor in a way of their own.
  /// @param most elements that are worth a copy
  /// @returns false if it has more, was written to already, or its memory is gone
  [[nodiscard]] bool freeze(const c10::SymInt& most);

  /// The same for two, in one copy where that can be.
  [[nodiscard]] static bool freeze(Kept& first, Kept& second, const c10::SymInt& most);

  /// At forward, for what is too large to be copied: whether lend() can give it. Not if it was
  /// written to, or FSDP has taken its memory away until backward.
  [[nodiscard]] bool is_there();

  /// For a later layer. Held from here on, until take() or the next backward call.
  /// @throws c10::Error if there is no copy and its memory was taken away, as FSDP does with
  /// parameters.
  [[nodiscard]] at::Tensor lend(torch::autograd::Node* owner = nullptr) {
    if (frozen_) {
      return frozen_->lend();
    }
    at::Tensor tensor = lent_.get();
    if (!tensor.defined()) {
      tensor = unpack(owner);
      TORCH_CHECK(
          !tensor.defined() || !tensor.has_storage() || tensor.sym_numel() == 0 ||
              tensor.storage().sym_nbytes() != 0,
          "recompute=\"cheap\" or \"products\" reads the parameters of the layers before again in "
          "backward, but FSDP has freed those of another unit: put a layer and the "
          "normalisation and activation before it into one unit, or give fully_shard "
          "reshard_after_forward=False");
      lent_.set(tensor);
    }
    return in_graph(tensor);
  }

  /// For the node's own backward. @throws c10::Error after release().
  [[nodiscard]] at::Tensor take(torch::autograd::Node* owner = nullptr) {
    const at::Tensor tensor = lent_.get();
    lent_.reset();
    return in_graph(tensor.defined() ? tensor : unpack(owner));
  }

  void release() {
    saved_.reset_data();
    if (in_block_) {
      in_block_->value.reset();
    }
    lent_.reset();
    frozen_.reset();
  }

 private:
  /// A copy, and where its source is in the graph.
  struct Frozen {
    Frozen(const at::Tensor& tensor, const at::Tensor& values);
    [[nodiscard]] at::Tensor lend() const;

    torch::autograd::SavedVariable copy;  // so that hooks that watch see it
    torch::autograd::Edge edge;
  };

  /// In a block that can run again: as its saved-tensor hooks would hold it, without them, which
  /// take the GIL.
  struct InBlock {
    std::optional<Block::Saved> value;  // until release()
    torch::autograd::Edge edge;         // where it is in the graph
  };

  [[nodiscard]] static std::unique_ptr<InBlock> held_by_block(const at::Tensor& tensor,
                                                              bool is_output);
  [[nodiscard]] at::Tensor unpack_saved() const;
  [[nodiscard]] bool needs_copy() const;
  [[nodiscard]] std::optional<at::Tensor> to_copy(const c10::SymInt& most) const;
  [[nodiscard]] at::Tensor unpack(torch::autograd::Node* owner);
  [[nodiscard]] at::Tensor in_graph(const at::Tensor& unpacked) const;

  torch::autograd::SavedVariable saved_;
  std::unique_ptr<InBlock> in_block_;  // instead, in a block
  ForThisBackward lent_;
  std::unique_ptr<Frozen> frozen_;
};

}  // namespace brim::nn
