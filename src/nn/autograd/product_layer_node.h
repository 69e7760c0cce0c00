#pragma once

#include <c10/core/SymBool.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <utility>

#include "nn/autograd/held_output.h"
#include "nn/autograd/operand.h"
#include "nn/autograd/optional_tensor.h"

namespace brim::nn {

/// The node of a linear layer or a convolution. It can run the layer again in backward, for the
/// layers after it. That takes as long as its forward, so it is offered only if the user allows it.
class ProductLayerNode : public OutputHoldingNode {
 public:
  ProductLayerNode(const at::Tensor& input, bool holds_output)
      : OutputHoldingNode(holds_output), input_(input), type_(input.scalar_type()) {}

  /// At forward, with the output.
  /// @param parameter what autocast cast the weight from
  /// @param reads_weight in backward
  /// @param runs_again offer that, if the output is larger than the input: the next layer does not
  ///        keep the output then, and nobody keeps more than the input
  void keep(const at::Tensor& input, const at::Tensor& weight, const MaybeTensor& bias,
            const MaybeTensor& parameter, const at::Tensor& output, bool reads_weight,
            Again recompute, bool runs_again) {
    if (weight.requires_grad()) {
      input_.keep(input, recompute);
    }
    mode_ = recompute;
    is_offered_ = runs_again && (asks_now(recompute) || !recompute.is_if_short()) &&
                  TORCH_GUARD_OR_FALSE(output.sym_numel().sym_gt(input.sym_numel())) &&
                  (reads_weight || stays(weight, parameter));
    if (reads_weight || is_offered_) {
      const at::Tensor& kept = weight_to_keep(input, weight, parameter, recompute);
      weight_ = Kept(kept);
      if (recompute.is_if_short() && weight.requires_grad() && !kept.is_same(weight)) {
        cast_.set(weight, /*work=*/0);
      }
    }
    if (is_offered_) {
      allow_to_run_again(input, bias);
    }
    if (recompute.is_if_short()) {
      work_ = work_of(weight);
    }
  }

  bool offers_product() const override { return is_offered_ && !is_held(); }

  Again saves_if_asked() const override {
    return !offers_product() ? Again(false) : mode_.is_if_short() ? mode_ : Again(true);
  }

  double work() const override { return work_; }

  std::optional<int> layers_to_recompute() const override {
    return offers_product() ? input_.layers() : OutputHoldingNode::layers_to_recompute();
  }

  bool prepare_to_recompute(bool copies) override {
    if (OutputHoldingNode::prepare_to_recompute(copies)) {
      return true;
    }
    const std::lock_guard lock(mutex_);
    return prepare(copies);
  }

  at::Tensor recompute() override {
    const std::lock_guard lock(mutex_);
    if (is_held()) {
      return held_output();
    }
    at::Tensor output = again_.get();
    if (!output.defined()) {
      // As at forward: below autocast, which has done its casts there.
      const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      output =
          run_again(input_.lend(), in_type([this] { return weight_.lend(); }), maybe(bias_.lend()));
      if (askers_ > 1 && !is_for_loss_) {  // a single one holds it itself
        again_.set(output);
      }
    }
    return output;
  }

 protected:
  /// Under the lock, as at forward.
  [[nodiscard]] virtual at::Tensor run_again(const at::Tensor& input, const at::Tensor& weight,
                                             const MaybeTensor& bias) const = 0;

  /// At forward.
  void allow_to_run_again(const at::Tensor& input, const MaybeTensor& bias) {
    if (std::exchange(is_allowed_, true)) {
      return;
    }
    bias_ = kept(bias);
    input_.lend_like(input);
  }

  /// Under the lock.
  [[nodiscard]] bool prepare(bool copies, bool for_loss = false) {
    // The weight is too large to be copied. If it is written to later, the node's own backward
    // fails too, as torch's does.
    if (!is_allowed_ || !weight_.is_there() || (copies && !bias_.freeze(elements())) ||
        !input_.ask(copies)) {
      return false;
    }
    ++askers_;
    is_for_loss_ = is_for_loss_ || for_loss;
    return true;
  }

  /// For the node's own backward.
  [[nodiscard]] at::Tensor take_weight() {
    return in_type([this] { return weight_.take(); });
  }

  void forget() override {
    input_.forget();
    again_.reset();
  }

  void release() override {
    input_.release();
    weight_.release();
    cast_.reset();
    bias_.release();
    again_.reset();
  }

  Operand input_;
  ForThisBackward again_;  // the output, between the first of several askers and backward()

 private:
  /// A multiplication and an addition for each number of the weight that an element of the output
  /// is made of.
  [[nodiscard]] static double work_of(const at::Tensor& weight) {
    return is_traced_by_others(weight) || weight.size(0) == 0
               ? 0
               : 2 * static_cast<double>(weight.numel()) / static_cast<double>(weight.size(0));
  }

  /// Whether the weight stays without being kept: a parameter, or a view of one. A weight that was
  /// computed (LoRA merged into it) is memory of its own.
  [[nodiscard]] static bool stays(const at::Tensor& weight, const MaybeTensor& parameter) {
    const at::Tensor& source = is_given(parameter) ? *parameter : weight;
    return source.is_leaf() || (source.is_view() && source._base().is_leaf());
  }

  /// Which to keep: the weight, or the parameter that autocast cast that from, to cast it again in
  /// backward. For a trained weight that takes more time than torch's layer, so it is left to
  /// `recompute`, and to copies that count beside the input. If that is asked for only where memory
  /// is short, the copy is kept beside the parameter until then.
  [[nodiscard]] static at::Tensor weight_to_keep(const at::Tensor& input, const at::Tensor& weight,
                                                 const MaybeTensor& parameter, Again recompute) {
    constexpr int kMuchLess = 16;
    const auto counts = [&] {
      return is_traced_by_others(input) || kMuchLess * weight.numel() >= input.numel();
    };
    const bool may_wait = recompute.is_if_short() && asks_now(recompute) &&
                          !is_traced_by_others(weight) && stays(weight, parameter);
    const bool casts_again =
        is_given(parameter) &&
        (!weight.requires_grad() || ((recompute.is_always() || may_wait) && counts()));
    return casts_again ? *parameter : weight;
  }

  /// The weight as the layer calculated with it, in its place in the graph. @param get what is kept
  template <class Get>
  [[nodiscard]] at::Tensor in_type(const Get& get) const {
    at::Tensor cast = cast_.get();
    if (!cast.defined()) {
      const at::Tensor weight = get();
      if (weight.scalar_type() == type_) {
        return weight;
      }
      const at::AutoGradMode without(false);
      cast = weight.to(type_);
    }
    return with_history(cast, next_edge(1));
  }

  at::ScalarType type_;  // of the input
  Again mode_;
  double work_ = 0;
  bool is_allowed_ = false;
  bool is_offered_ = false;
  bool is_for_loss_ = false;
  int askers_ = 0;
  Kept weight_;
  KeptWhileRoom cast_;  // of the weight by autocast, where the parameter is kept
  Kept bias_;
};

}  // namespace brim::nn
