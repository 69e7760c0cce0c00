#include "nn/autograd/rerun.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <unordered_set>

namespace brim::nn {
namespace {

using torch::autograd::AccumulateGrad;

/// Hooks of the program see what it keeps, not what lives inside of one backward.
class WithoutSavedTensorHooks {
 public:
  WithoutSavedTensorHooks() { at::SavedTensorDefaultHooks::set_tls_state({}); }
  WithoutSavedTensorHooks(const WithoutSavedTensorHooks&) = delete;
  WithoutSavedTensorHooks& operator=(const WithoutSavedTensorHooks&) = delete;
  ~WithoutSavedTensorHooks() { at::SavedTensorDefaultHooks::set_tls_state(before_); }

 private:
  at::impl::SavedTensorDefaultHooksTLS before_ = at::SavedTensorDefaultHooks::get_tls_state();
};

/// Where the graph of a function that runs again begins. It never runs: gradients are taken there.
class InputNode final : public Node {
 public:
  variable_list apply(variable_list&& grads) override { return std::move(grads); }
  std::string name() const override { return "brim::input_of_rerun"; }
};

/// An input of that function, and a tensor without memory at the same place in the graph: whoever
/// asks for the gradient need not hold the input.
struct Begun {
  at::Tensor input;
  at::Tensor place;

  explicit Begun(const at::Tensor& value)
      : input(without_history(value)), place(at::empty({0}, value.options())) {
    const auto node = make_node<InputNode>();
    node->add_input_metadata(value);
    for (const at::Tensor* const each : {&input, &place}) {
      torch::autograd::impl::set_gradient_edge(*each, {node, 0});
    }
  }
};

/// Whether the graph that leads to `output` has leaves: those of the inputs are no part of it.
bool reaches_others(const at::Tensor& output) {
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> open{output.grad_fn().get()};
  while (!open.empty()) {
    const Node* const node = open.back();
    open.pop_back();
    if (node == nullptr || !seen.insert(node).second) {
      continue;
    }
    if (dynamic_cast<const AccumulateGrad*>(node) != nullptr) {
      return true;
    }
    for (const auto& edge : node->next_edges()) {
      open.push_back(edge.function.get());
    }
  }
  return false;
}

}  // namespace

variable_list grads_by_rerun(c10::function_ref<at::Tensor(const variable_list&)> function,
                             variable_list inputs, const at::Tensor& grad,
                             const std::vector<bool>& needed, const AutocastState& autocast) {
  const bool in_graph = at::GradMode::is_enabled();
  const at::AutoGradMode grad_mode(true);
  const WithoutSavedTensorHooks without_hooks;
  variable_list given;
  variable_list wanted;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!needed[i]) {
      given.push_back(inputs[i].detach());
    } else if (in_graph) {
      // An alias: its gradient is that through `function` alone.
      wanted.push_back(given.emplace_back(at::alias(inputs[i])));
    } else {
      Begun begun(inputs[i]);
      given.push_back(std::move(begun.input));
      wanted.push_back(std::move(begun.place));
    }
  }
  const at::Tensor output = [&] {
    const AutocastAs as(autocast);
    return function(given);
  }();
  given.clear();
  inputs.clear();
  TORCH_CHECK(in_graph || !reaches_others(output),
              "a function that runs again in backward reads a tensor that needs a gradient and is "
              "not one of its inputs: pass it as an input, or its gradient would be lost");
  variable_list found = torch::autograd::grad({output}, wanted, {grad}, /*retain_graph=*/in_graph,
                                              /*create_graph=*/in_graph, /*allow_unused=*/true);
  variable_list result(needed.size());
  std::size_t next = 0;
  for (std::size_t i = 0; i < needed.size(); ++i) {
    if (needed[i]) {
      result[i] = std::move(found[next++]);
    }
  }
  return result;
}

}  // namespace brim::nn
