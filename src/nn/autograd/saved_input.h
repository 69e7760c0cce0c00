#pragma once

#include "nn/autograd/node.h"
#include "nn/autograd/recompute.h"

namespace brim::nn {

/// The input of a layer that needs it for the gradient of its weight: kept, or recomputed by the
/// layer that made it. Used under the lock of its node.
class KeptInput {
 public:
  /// At forward. @param recompute keep nothing, if the input can be recomputed
  void keep(const at::Tensor& input, bool recompute) {
    const auto& producer = input.grad_fn();
    if (recompute && are_few(layers_to_recompute(producer.get(), version_of(input))) &&
        prepare_to_recompute(*producer)) {
      producer_ = producer;
      asks_ = true;
      return;
    }
    tell_producer_kept(input);
    saved_ = SavedVariable(input, false);
  }

  /// Whether get() costs time.
  [[nodiscard]] bool asks() const { return asks_; }

  /// At backward. @throws c10::Error after release().
  [[nodiscard]] at::Tensor get() {
    if (!asks_) {
      return saved_.unpack();
    }
    TORCH_CHECK(producer_ != nullptr, torch::autograd::ERR_BACKWARD_TWICE);
    return nn::recompute(*producer_);
  }

  void release() {
    saved_.reset_data();
    producer_.reset();
  }

 private:
  bool asks_ = false;
  SavedVariable saved_;
  // Among the edges of the asking node too, so this makes no circle.
  NodePtr producer_;
};

/// `tensor` in the type of the layer's input.
[[nodiscard]] inline at::Tensor in_type(const at::Tensor& tensor, at::ScalarType type) {
  return tensor.scalar_type() == type ? tensor : tensor.to(type);
}

}  // namespace brim::nn
