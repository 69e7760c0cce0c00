#pragma once

#include <c10/util/FunctionRef.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "nn/autograd/autocast.h"
#include "nn/autograd/operand.h"

// Cheap functions of one or more tensors (a gated activation, a GELU written out in Python) keep
// their inputs and run again in backward. What they would have kept inside is never kept.

namespace brim::nn {

/// The gradients of the inputs, by autograd inside of a backward: the same operators in the same
/// order as if `function` had been recorded at forward, so the same bits. Under grad mode (double
/// backward) they are part of the graph; else, what nobody else holds of the inputs is freed before
/// their gradients exist, where the derivative of `function` does not read it.
/// @param needed which of them; the others stay undefined
/// @throws c10::Error if `function` reads a tensor that needs a gradient and is no input: that
///         gradient would be lost.
[[nodiscard]] variable_list grads_by_rerun(
    c10::function_ref<at::Tensor(const variable_list&)> function, variable_list inputs,
    const at::Tensor& grad, const std::vector<bool>& needed, const AutocastState& autocast);

/// What is particular to a function is in `Function`, which the node holds:
///
///     std::string_view name() const;
///     at::Tensor value(const variable_list& inputs) const;
///     // Faster than by running again, with the same bits; nothing where there is no such way.
///     // Both are called under the autocast of the forward pass.
///     std::optional<variable_list> grads(const at::Tensor& grad, const variable_list& inputs,
///                                        const std::vector<bool>& needed) const;
template <class Function>
class RerunNode final : public SavingNode {
 public:
  RerunNode(Function function, const variable_list& inputs, Again recompute, bool is_cheap)
      : function_(std::move(function)),
        autocast_(inputs.front().device().type()),
        is_cheap_(is_cheap) {
    set_next_edges(torch::autograd::collect_next_edges(inputs));
    inputs_.reserve(inputs.size());
    for (const at::Tensor& input : inputs) {
      inputs_.emplace_back(input).keep(input, recompute);
    }
  }

  std::optional<int> layers_to_recompute() const override {
    if (!is_cheap_) {
      return std::nullopt;
    }
    std::optional<int> most = 0;
    for (const Operand& input : inputs_) {
      most = most_layers(most, input.layers());
    }
    return most;
  }

  at::Tensor recompute() override {
    const std::lock_guard lock(mutex_);
    const variable_list inputs = each([](Operand& input) { return input.lend(); });
    const AutocastAs as(autocast_);
    return function_.value(inputs);
  }

  std::string name() const override {
    return "brim::" + std::string(function_.name()) + "_backward";
  }

 protected:
  variable_list backward(const at::Tensor& grad) override {
    std::vector<bool> needed(inputs_.size());
    for (std::size_t i = 0; i < needed.size(); ++i) {
      needed[i] = task_should_compute_output(i);
    }
    const variable_list inputs = each([](Operand& input) { return input.take(); });
    if (!at::GradMode::is_enabled()) {
      const AutocastAs as(autocast_);
      if (auto result = function_.grads(grad, inputs, needed)) {
        return *std::move(result);
      }
    }
    return grads_by_rerun([&](const variable_list& given) { return function_.value(given); },
                          inputs, grad, needed, autocast_);
  }

  void forget() override { std::ranges::for_each(inputs_, &Operand::forget); }
  void release() override { std::ranges::for_each(inputs_, &Operand::release); }

 private:
  template <class Get>
  variable_list each(const Get& get) {
    variable_list tensors;
    tensors.reserve(inputs_.size());
    for (Operand& input : inputs_) {
      tensors.push_back(get(input));
    }
    return tensors;
  }

  Function function_;
  AutocastState autocast_;
  bool is_cheap_;
  std::vector<Operand> inputs_;
};

/// The value of `function`, with a node if something needs a gradient.
/// @param recompute keep no input that the layer before can recompute
/// @param is_cheap whether later layers may have it run once more to get the value again
template <class Function>
at::Tensor run_and_keep_inputs(Function function, const variable_list& inputs, Again recompute,
                               bool is_cheap = true) {
  at::Tensor output = [&] {
    const AutocastAs without_cache{AutocastState(inputs.front().device().type())};
    const BelowAutograd below;
    return function.value(inputs);
  }();
  if (needs_grad(at::TensorList(inputs))) {
    const auto node =
        make_node<RerunNode<Function>>(std::move(function), inputs, recompute, is_cheap);
    torch::autograd::set_history(output, node);
    node->set_output(output);
  }
  return output;
}

}  // namespace brim::nn
