#pragma once

#include "nn/autograd/node.h"
#include "nn/autograd/recompute.h"
#include "nn/autograd/saved_tensor.h"

namespace brim::nn {

/// An input that a node needs in backward and lends to layers behind it before that: kept, or
/// recomputed by the layer that made it. Used under the lock of its node.
class Operand {
 public:
  /// At forward. @param recompute keep nothing, if the input can be recomputed
  void keep(const at::Tensor& input, bool recompute) {
    const auto& producer = input.grad_fn();
    if (recompute) {
      const auto layers = nn::layers_to_recompute(producer.get(), version_of(input));
      if (are_few(layers) && prepare_to_recompute(*producer)) {
        producer_ = producer;
        layers_ = *layers;
        return;
      }
    }
    tell_producer_kept(input);
    kept_ = Kept(input);
  }

  /// How many layers in a row lend() runs.
  [[nodiscard]] int layers() const { return layers_; }

  /// For a layer behind. Held from here on, until take() or the next backward call.
  /// @throws c10::Error after release(), as take() does.
  [[nodiscard]] at::Tensor lend() {
    if (!producer_) {
      return kept_.lend();
    }
    at::Tensor value = again_.get();
    if (!value.defined()) {
      value = nn::recompute(*producer_);
      again_.set(value);
    }
    return value;
  }

  /// For the node's own backward.
  [[nodiscard]] at::Tensor take() {
    if (!producer_) {
      return kept_.take();
    }
    at::Tensor value = lend();
    again_.reset();
    return value;
  }

  void release() {
    kept_.release();
    producer_.reset();
    again_.reset();
  }

 private:
  Kept kept_;
  NodePtr producer_;  // among the edges of the node too, so this makes no circle
  int layers_ = 0;
  ForThisBackward again_;
};

}  // namespace brim::nn
