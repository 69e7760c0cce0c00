#pragma once

#include <torch/csrc/autograd/VariableTypeUtils.h>

#include <array>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>

#include "nn/autograd/node.h"

namespace brim::nn {

/// The node of a function of one tensor that is linear, at least in pieces: backward reads nothing
/// of the tensor's values but what is in `kept`, such as bits.
template <std::size_t Count, class Backward>
class LinearFunctionNode final : public Node {
 public:
  LinearFunctionNode(const char* name, bool ties, std::array<SavedVariable, Count> kept,
                     Backward backward)
      : name_(name), ties_(ties), kept_(std::move(kept)), backward_(std::move(backward)) {}

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard lock(mutex_);
    if (!grads[0].defined()) {
      return {at::Tensor()};
    }
    const at::Tensor grad = std::apply(
        [&](const auto&... each) { return backward_(grads[0], each.unpack()...); }, kept_);
    return {ties_ ? tied_to(next_edge(0), grad) : grad};
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    for (SavedVariable& each : kept_) {
      each.reset_data();
    }
  }

  std::string name() const override { return name_; }

 private:
  const char* name_;
  bool ties_;
  std::array<SavedVariable, Count> kept_;
  Backward backward_;
};

/// Makes `output`, computed below autograd, such a function of `input`.
/// @param ties whether a second derivative leads to the input, as zeros (see tied_to)
/// @param backward (grad, kept...), which gives the gradient of `input`
template <class Backward, class... Kept>
void set_linear_history(const at::Tensor& output, const at::Tensor& input, const char* name,
                        bool ties, Backward backward, const Kept&... kept) {
  const auto node = make_node<LinearFunctionNode<sizeof...(Kept), Backward>>(
      name, ties, std::array<SavedVariable, sizeof...(Kept)>{SavedVariable(kept, false)...},
      std::move(backward));
  node->set_next_edges(torch::autograd::collect_next_edges(input));
  torch::autograd::set_history(output, node);
}

}  // namespace brim::nn
