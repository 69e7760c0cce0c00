#pragma once

#include "nn/autograd/kept_while_room.h"
#include "nn/autograd/node.h"
#include "nn/autograd/recompute.h"
#include "nn/autograd/saved_tensor.h"

namespace brim::nn {

/// A tensor that a layer's backward may read, and from which the layer's output can be computed
/// again: kept, or asked of the layer that made it. Used under the lock of its node.
class Operand {
 public:
  explicit Operand(const at::Tensor& tensor)
      : origin_(origin_of(tensor)), before_(version_of(tensor)) {}

  /// At forward, if backward reads it.
  /// @param recompute keep nothing, if the layer before can recompute it
  void keep(const at::Tensor& tensor, Again recompute) {
    if (asks_now(recompute) && ask(recompute.is_always())) {
      strides_ = c10::SymDimVector(tensor.sym_strides());
      if (recompute.is_if_short()) {
        while_room_.set(tensor, work_to_recompute(tensor));
        counts_as_kept_ = true;
      }
      return;
    }
    tell_producer_kept(tensor);
    saved_ = Kept(tensor);
    is_kept_ = true;
    is_leaf_ = tensor.is_leaf();
  }

  /// At forward: whether take() and lend() need no copy, from here on; see
  /// SavingNode::prepare_to_recompute.
  [[nodiscard]] bool ask(bool copies) {
    is_asked_for_ =
        is_kept_ || is_asked_for_ ||
        (are_few(before_.without(origin_)) && nn::prepare_to_recompute(*origin_.function, copies));
    return is_asked_for_;
  }

  /// At forward, if only later layers read it, and need these strides: as a kernel may sum in the
  /// order of memory.
  void lend_like(const at::Tensor& tensor) { strides_ = c10::SymDimVector(tensor.sym_strides()); }

  /// Else take() costs time. What is kept while there is room counts, also when it was dropped:
  /// gradients must not depend on that.
  [[nodiscard]] bool is_kept() const { return is_kept_ || counts_as_kept_; }

  /// As SavingNode::layers_to_recompute(), for the layer that reads it.
  [[nodiscard]] std::optional<int> layers() const {
    return is_kept_ ? std::optional(1) : before_.with(origin_);
  }

  /// Before lend() is relied on. @param most elements of a weight that are worth a copy
  [[nodiscard]] bool prepare(const c10::SymInt& most, bool copies) {
    if (!is_kept_) {
      return nn::prepare_to_recompute(*origin_.function, copies);
    }
    return !is_leaf_ || !copies || saved_.freeze(most);
  }

  /// For a later layer. Held from here on, until take() or the next backward call.
  [[nodiscard]] at::Tensor lend() {
    if (is_kept_) {
      return saved_.lend();
    }
    at::Tensor value = again_.get();
    if (!value.defined()) {
      value = while_room_.get();
    }
    if (!value.defined()) {
      TORCH_CHECK(origin_.is_valid(), torch::autograd::ERR_BACKWARD_TWICE);
      const TimedAgain timed = while_room_.timed();
      value = nn::recompute(origin_, strides_);
      again_.set(value);
    }
    return with_history(value, origin_);
  }

  /// At the end of the node's own backward: what was lent and not taken.
  void forget() { again_.reset(); }

  /// For the node's own backward. @throws c10::Error after release().
  [[nodiscard]] at::Tensor take() {
    if (is_kept_) {
      return saved_.take();
    }
    at::Tensor value = lend();
    again_.reset();
    return value;
  }

  void release() {
    saved_.release();
    while_room_.reset();
    again_.reset();
    origin_ = {};
  }

 private:
  // Among the edges of the node too, so this makes no circle.
  Edge origin_;
  LayersBefore before_;
  bool is_kept_ = false;
  bool counts_as_kept_ = false;
  bool is_asked_for_ = false;
  bool is_leaf_ = false;
  Kept saved_;
  KeptWhileRoom while_room_;
  c10::SymDimVector strides_;  // if they count
  ForThisBackward again_;
};

}  // namespace brim::nn
