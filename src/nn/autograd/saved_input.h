#pragma once

#include "nn/autograd/node.h"
#include "nn/autograd/recompute.h"
#include "nn/autograd/saved_tensor.h"

namespace brim::nn {

/// The input of a layer that needs it for the gradient of its weight: kept, or recomputed by the
/// layer that made it. Used under the lock of its node.
class KeptInput {
 public:
  /// At forward. @param recompute keep nothing, if the input can be recomputed
  void keep(const at::Tensor& input, bool recompute) {
    if (recompute && ask(input.grad_fn(), version_of(input))) {
      return;
    }
    tell_producer_kept(input);
    saved_ = Kept(input);
  }

  /// At forward: from here on `producer` recomputes the input. @returns false if it cannot
  [[nodiscard]] bool ask(const NodePtr& producer, const TensorVersion& input) {
    if (!are_few(layers_to_recompute(producer.get(), input)) || !prepare_to_recompute(*producer)) {
      return false;
    }
    producer_ = producer;
    asks_ = true;
    return true;
  }

  /// Whether get() costs time.
  [[nodiscard]] bool asks() const { return asks_; }

  /// At backward. @throws c10::Error after release().
  [[nodiscard]] at::Tensor get() {
    if (!asks_) {
      return saved_.take();
    }
    const at::Tensor lent = again_.get();
    again_.reset();
    return lent.defined() ? lent : recompute();
  }

  /// At backward, for a layer behind. What was recomputed is held until get().
  [[nodiscard]] at::Tensor lend() {
    if (!asks_) {
      return saved_.lend();
    }
    at::Tensor value = again_.get();
    if (!value.defined()) {
      value = recompute();
      again_.set(value);
    }
    return value;
  }

  void release() {
    saved_.release();
    again_.reset();
    producer_.reset();
  }

 private:
  [[nodiscard]] at::Tensor recompute() const {
    TORCH_CHECK(producer_ != nullptr, torch::autograd::ERR_BACKWARD_TWICE);
    return nn::recompute(*producer_);
  }

  bool asks_ = false;
  Kept saved_;
  ForThisBackward again_;
  // Among the edges of the asking node too, so this makes no circle.
  NodePtr producer_;
};

/// `tensor` in the type of the layer's input.
[[nodiscard]] inline at::Tensor in_type(const at::Tensor& tensor, at::ScalarType type) {
  return tensor.scalar_type() == type ? tensor : tensor.to(type);
}

}  // namespace brim::nn
