#pragma once

#include <c10/core/SymBool.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "nn/autograd/operand.h"
#include "nn/autograd/optional_tensor.h"

namespace brim::nn {

/// Whether a product is worth running again in backward: the next layer does not keep the output,
/// and nobody keeps more than the input, which is smaller.
[[nodiscard]] inline bool widens(const at::Tensor& input, const at::Tensor& output) {
  return TORCH_GUARD_OR_FALSE(output.sym_numel().sym_gt(input.sym_numel()));
}

/// Whether the weight stays without being kept: a parameter, or a view of one. A weight that was
/// computed (LoRA merged into it) is memory of its own.
[[nodiscard]] inline bool stays(const at::Tensor& weight, const MaybeTensor& parameter) {
  const at::Tensor& source = is_given(parameter) ? *parameter : weight;
  return source.is_leaf() || (source.is_view() && source._base().is_leaf());
}

/// How the node of a linear layer or a convolution runs the layer again in backward, for the layers
/// after it. That takes as long as its forward, so it is offered only if the user allows it. Used
/// under the lock of the node, which keeps the weight.
class ProductAgain {
 public:
  /// At forward.
  /// @param is_offered to all layers after it, not only to a loss (see runs_again.h)
  void allow(const at::Tensor& input, const MaybeTensor& bias, bool is_offered, Operand& operand) {
    is_allowed_ = true;
    is_offered_ = is_offered;
    bias_ = kept(bias);
    operand.lend_like(input);
  }

  [[nodiscard]] bool is_offered() const { return is_offered_; }

  /// @param is_alone recompute() gives memory that nobody else uses
  [[nodiscard]] bool prepare(Operand& input, Kept& weight, const c10::SymInt& elements,
                             bool is_alone = false) {
    // The weight is too large to be copied. If it is written to later, the node's own backward
    // fails too, as torch's does.
    if (!is_allowed_ || !weight.is_there() || !bias_.freeze(elements) ||
        !(input.is_kept() || input.ask())) {
      return false;
    }
    ++askers_;
    is_alone_ = is_alone_ || is_alone;
    return true;
  }

  /// What `run` gives for the bias, as at forward: below autocast, which has done its casts there.
  template <class Run>
  [[nodiscard]] at::Tensor recompute(const Run& run) {
    at::Tensor output = again_.get();
    if (!output.defined()) {
      const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      output = run(maybe(bias_.lend()));
      if (askers_ > 1 && !is_alone_) {  // a single one holds it itself
        again_.set(output);
      }
    }
    return output;
  }

  /// At the node's own backward.
  void forget() { again_.reset(); }

  void release() {
    bias_.release();
    again_.reset();
  }

 private:
  bool is_allowed_ = false;
  bool is_offered_ = false;
  bool is_alone_ = false;
  int askers_ = 0;
  Kept bias_;
  ForThisBackward again_;  // between the first of several askers and the node's own backward
};

}  // namespace brim::nn
