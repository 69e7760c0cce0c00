#include "nn/autograd/rerun.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/alias.h>
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

/// Leaves of the graph that leads to `output` that are not among `inputs`.
bool reaches_others(const at::Tensor& output, const variable_list& inputs) {
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> open{output.grad_fn().get()};
  while (!open.empty()) {
    const Node* const node = open.back();
    open.pop_back();
    if (node == nullptr || !seen.insert(node).second) {
      continue;
    }
    if (const auto* const leaf = dynamic_cast<const AccumulateGrad*>(node)) {
      if (std::ranges::none_of(inputs,
                               [&](const at::Tensor& x) { return x.is_same(leaf->variable); })) {
        return true;
      }
    }
    for (const auto& edge : node->next_edges()) {
      open.push_back(edge.function.get());
    }
  }
  return false;
}

}  // namespace

variable_list grads_by_rerun(c10::function_ref<at::Tensor(const variable_list&)> function,
                             const variable_list& inputs, const at::Tensor& grad,
                             const std::vector<bool>& needed, const AutocastState& autocast) {
  const bool in_graph = at::GradMode::is_enabled();
  const at::AutoGradMode grad_mode(true);
  const WithoutSavedTensorHooks without_hooks;
  variable_list given;
  variable_list wanted;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    // In the graph an alias: its gradient is that through `function` alone.
    at::Tensor input = in_graph && needed[i] ? at::alias(inputs[i]) : inputs[i].detach();
    if (needed[i]) {
      wanted.push_back(in_graph ? input : input.requires_grad_());
    }
    given.push_back(std::move(input));
  }
  const at::Tensor output = [&] {
    const AutocastAs as(autocast);
    return function(given);
  }();
  TORCH_CHECK(in_graph || !reaches_others(output, given),
              "a function that runs again in backward reads a tensor that needs a gradient and is "
              "not one of its inputs: pass it as an input, or its gradient would be lost");
  variable_list found = torch::autograd::grad({output}, wanted, {grad}, /*retain_graph=*/in_graph,
                                              /*create_graph=*/in_graph, /*allow_unused=*/true);
  variable_list result(inputs.size());
  std::size_t next = 0;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (needed[i]) {
      result[i] = std::move(found[next++]);
    }
  }
  return result;
}

}  // namespace brim::nn
