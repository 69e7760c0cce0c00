#include <ATen/ops/add.h>
#include <brim/nn/functional.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>

#include <algorithm>

#include "nn/autograd/held_output.h"
#include "nn/autograd/operator.h"
#include "nn/autograd/recompute.h"

namespace brim::nn {
namespace {

/// Keeps nothing. Unlike torch's sum, it knows whether somebody wrote to its output: sums of sums
/// can be recomputed.
class SumNode final : public OutputHoldingNode {
 public:
  SumNode(const at::Tensor& first, const at::Tensor& second)
      : OutputHoldingNode(true),
        before_first_(version_of(first)),
        before_second_(version_of(second)),
        is_one_type_(first.scalar_type() == second.scalar_type()) {}

  std::optional<int> layers_to_recompute() const override {
    if (is_held() || !is_one_type_) {
      return OutputHoldingNode::layers_to_recompute();
    }
    const auto first = before_first_.with(next_edge(0).function.get());
    const auto both =
        first ? most_layers(first, before_second_.with(next_edge(1).function.get())) : first;
    // One more: the value is not held, so each layer that asks runs the sums before it again.
    return both ? std::optional(*both + 1) : std::nullopt;
  }

  bool prepare_to_recompute() override {
    return OutputHoldingNode::prepare_to_recompute() ||
           (nn::prepare_to_recompute(*next_edge(0).function) &&
            nn::prepare_to_recompute(*next_edge(1).function));
  }

  at::Tensor recompute() override {
    if (is_held()) {
      return OutputHoldingNode::recompute();
    }
    return at::add(nn::recompute(*next_edge(0).function), nn::recompute(*next_edge(1).function));
  }

  variable_list apply(variable_list&& grads) override { return {grads[0], grads[0]}; }

  std::string name() const override { return "brim::add_backward"; }

 private:
  LayersBefore before_first_;
  LayersBefore before_second_;
  bool is_one_type_;
};

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
