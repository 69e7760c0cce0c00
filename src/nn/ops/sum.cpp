#include <ATen/ops/add.h>
#include <brim/nn/functional.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>

#include <algorithm>

#include "nn/autograd/held_output.h"
#include "nn/autograd/operator.h"
#include "nn/autograd/recompute.h"
#include "nn/autograd/storage_pinning.h"
#include "nn/region/region.h"

namespace brim::nn {
namespace {

/// Keeps nothing. Unlike torch's sum, it knows whether somebody wrote to its output: sums of sums
/// can be recomputed.
///
/// Under autocast a residual stream is in float32 and what is added to it in a low type, which
/// takes half the memory of the sum:
///
///     sum (kept by a norm)  ->  sum (the next norm asks for it; keeps what was added)  ->  ...
///
/// So if somebody keeps the wide operand, the sum keeps the other one until it is clear whether a
/// layer keeps the sum itself.
class SumNode final : public OutputHoldingNode {
 public:
  SumNode(const at::Tensor& first, const at::Tensor& second)
      : OutputHoldingNode(true),
        before_first_(version_of(first)),
        before_second_(version_of(second)),
        is_one_type_(first.scalar_type() == second.scalar_type()) {}

  /// At forward, when the node is in the graph, out of place.
  void keep_narrow(const at::Tensor& first, const at::Tensor& second) {
    is_first_wide_ = first.element_size() > second.element_size();
    const at::Tensor& narrow = is_first_wide_ ? second : first;
    if (first.element_size() == second.element_size() || first.sym_sizes() != second.sym_sizes() ||
        pins_more_than_itself(narrow) || hooks_in_force() != nullptr || layers_of_wide() != 0 ||
        recompute_here() == Recompute::automatic) {
      return;
    }
    narrow_ = Kept(narrow);
    keeps_narrow_ = true;
  }

  /// If nobody has asked for the sum.
  void drop_narrow() {
    const std::lock_guard lock(mutex_);
    if (!relies_on_narrow_) {
      narrow_.release();
      keeps_narrow_ = false;
    }
  }

  void output_is_kept(const at::Tensor& output) override {
    OutputHoldingNode::output_is_kept(output);
    // Layers that have asked get that one, too.
    relies_on_narrow_ = relies_on_narrow_ && !OutputHoldingNode::prepare_to_recompute(true);
    drop_narrow();
  }

  void output_is_overwritten(const at::Tensor& output) override {
    OutputHoldingNode::output_is_overwritten(output);
    drop_narrow();
  }

  Again saves_if_asked() const override { return keeps_narrow_; }

  std::optional<int> layers_to_recompute() const override {
    if (is_held() || (!is_one_type_ && !keeps_narrow_)) {
      return OutputHoldingNode::layers_to_recompute();
    }
    if (keeps_narrow_) {
      return 1;
    }
    const auto first = before_first_.with(next_edge(0));
    const auto both = first ? most_layers(first, before_second_.with(next_edge(1))) : first;
    // One more: the value is not held, so each layer that asks runs the sums before it again.
    return both ? std::optional(*both + 1) : std::nullopt;
  }

  bool prepare_to_recompute(bool copies) override {
    if (OutputHoldingNode::prepare_to_recompute(copies)) {
      return true;
    }
    if (!keeps_narrow_) {
      // Whoever asks may have seen it when the sum or an operand was still held.
      return layers_to_recompute() && nn::prepare_to_recompute(*next_edge(0).function, copies) &&
             nn::prepare_to_recompute(*next_edge(1).function, copies);
    }
    const std::lock_guard lock(mutex_);
    relies_on_narrow_ =
        relies_on_narrow_ ||
        (narrow_.is_there() && nn::prepare_to_recompute(*wide_edge().function, copies));
    return relies_on_narrow_;
  }

  at::Tensor recompute() override {
    if (is_held()) {
      return OutputHoldingNode::recompute();
    }
    if (!keeps_narrow_) {
      return at::add(nn::recompute(next_edge(0)), nn::recompute(next_edge(1)));
    }
    const std::lock_guard lock(mutex_);
    const at::Tensor wide = nn::recompute(wide_edge());
    const at::Tensor narrow = narrow_.lend();
    return is_first_wide_ ? at::add(wide, narrow) : at::add(narrow, wide);
  }

  void will_release_variables() override {
    OutputHoldingNode::will_release_variables();
    const std::lock_guard lock(mutex_);
    narrow_.release();
  }

  /// Tells whoever looks at the graph what the sum keeps.
  std::string name() const override {
    return keeps_narrow_ ? "brim::add_of_two_types_backward" : "brim::add_backward";
  }

 private:
  variable_list backward(const at::Tensor& grad) override { return {grad, grad}; }

  [[nodiscard]] const Edge& wide_edge() const { return next_edge(is_first_wide_ ? 0 : 1); }

  [[nodiscard]] std::optional<int> layers_of_wide() const {
    return (is_first_wide_ ? before_first_ : before_second_).without(wide_edge());
  }

  LayersBefore before_first_;
  LayersBefore before_second_;
  bool is_one_type_;
  bool is_first_wide_ = false;
  bool keeps_narrow_ = false;
  bool relies_on_narrow_ = false;
  Kept narrow_;
};

/// What is added to a sum that nobody asked for is no longer waited for.
void drop_narrow_of(const at::Tensor& operand) {
  if (auto* const sum = dynamic_cast<SumNode*>(operand.grad_fn().get())) {
    sum->drop_narrow();
  }
}

template <bool InPlace>
// NOLINTNEXTLINE(performance-unnecessary-value-param): written to in place
at::Tensor run(at::Tensor first, const at::Tensor& second) {
  const bool needed = needs_grad(first, second);
  if (InPlace) {
    will_overwrite(first, needed);
  }
  PtrTo<SumNode> node;
  if (needed) {
    node = make_node<SumNode>(first, second);
    node->set_next_edges(torch::autograd::collect_next_edges(first, second));
  }
  at::Tensor output =
      below_autograd([&] { return InPlace ? first.add_(second) : at::add(first, second); });
  add_to_graph<InPlace>(output, node);
  if (needed) {
    drop_narrow_of(first);
    drop_narrow_of(second);
    if (!InPlace) {
      node->keep_narrow(first, second);
    }
  }
  return output;
}

at::Tensor add_autograd(const at::Tensor& input, const at::Tensor& other) {
  return run<false>(input, other);
}

at::Tensor& add_autograd_(at::Tensor& input, const at::Tensor& other) {
  run<true>(input, other);
  return input;
}

at::Tensor torch_add(const at::Tensor& input, const at::Tensor& other) {
  return at::add(input, other);
}

at::Tensor& torch_add_(at::Tensor& input, const at::Tensor& other) { return input.add_(other); }

const LayerOperator<add_autograd, torch_add> kAdd("add(Tensor input, Tensor other) -> Tensor");
const LayerOperator<add_autograd_, torch_add_> kAddInPlace(
    "add_(Tensor(a!) input, Tensor other) -> Tensor(a!)");

}  // namespace

at::Tensor functional::add(const at::Tensor& input, const at::Tensor& other, bool inplace) {
  if (inplace) {
    at::Tensor target = input;
    return kAddInPlace(target, other);
  }
  return kAdd(input, other);
}

}  // namespace brim::nn
