#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

namespace brim::nn {

/// Identifies the backward call that runs in this thread; -1 outside of one.
[[nodiscard]] int backward_now();

/// A tensor that is cached during one backward call. In the next one, what it was made of may have
/// changed, and it may be needed as part of the graph.
class ForThisBackward {
 public:
  /// Undefined if none was set in this backward call.
  [[nodiscard]] at::Tensor get() const {
    return tensor_.defined() && backward_ == backward_now() ? tensor_ : at::Tensor();
  }

  void set(at::Tensor tensor) {
    backward_ = backward_now();
    tensor_ = backward_ == -1 ? at::Tensor() : std::move(tensor);
  }

  void reset() { tensor_.reset(); }

 private:
  at::Tensor tensor_;
  int backward_ = -1;
};

}  // namespace brim::nn
