#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

namespace brim::nn {

/// A number for the backward call that runs in this thread; -1 outside of one.
[[nodiscard]] int backward_now();

/// A tensor that is worth having once more in the same backward call, and gone in the next: by then
/// what it was made of may have changed, and it may be asked for as part of the graph.
class ForThisBackward {
 public:
  /// Undefined where none was set in this backward call.
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
