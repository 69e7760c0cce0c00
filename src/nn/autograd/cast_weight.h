#pragma once

#include "nn/autograd/node.h"
#include "nn/autograd/optional_tensor.h"
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
      strides_ = c10::SymDimVector(input.sym_strides());
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
    return strides_.empty() ? nn::recompute(*producer_) : nn::recompute(*producer_, strides_);
  }

  bool asks_ = false;
  Kept saved_;
  ForThisBackward again_;
  // Among the edges of the asking node too, so this makes no circle.
  NodePtr producer_;
  c10::SymDimVector strides_;  // of the input that its own layer reads
};

/// Which a layer keeps: its weight, or the parameter that autocast cast that from, to cast it again
/// in backward. For a trained weight that takes more time than torch's layer, so it is left to
/// `recompute`, and to copies that count beside the input.
[[nodiscard]] inline at::Tensor weight_to_keep(const at::Tensor& input, const at::Tensor& weight,
                                               const MaybeTensor& parameter, bool recompute) {
  constexpr int kMuchLess = 16;
  const bool casts_again =
      is_given(parameter) &&
      (!weight.requires_grad() ||
       (recompute && (is_traced(input) || kMuchLess * weight.numel() >= input.numel())));
  return casts_again ? *parameter : weight;
}

/// `tensor` in the type of the layer's input.
[[nodiscard]] inline at::Tensor in_type(const at::Tensor& tensor, at::ScalarType type) {
  return tensor.scalar_type() == type ? tensor : tensor.to(type);
}

}  // namespace brim::nn
