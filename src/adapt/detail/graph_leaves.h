#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <deque>
#include <unordered_set>
#include <vector>

namespace brim::detail {

/// The leaves that the graph of a loss shows, the nearest first.
inline std::vector<at::Tensor> leaves_of(const at::Tensor& loss) {
  using torch::autograd::Node;
  if (!loss.grad_fn()) {
    return {loss};  // a parameter itself
  }
  std::vector<at::Tensor> leaves;
  std::deque<Node*> open{&*loss.grad_fn()};
  std::unordered_set<const Node*> seen;
  while (!open.empty()) {
    Node* const node = open.front();
    open.pop_front();
    if (node->num_outputs() == 0) {
      if (const auto* end = dynamic_cast<const torch::autograd::AccumulateGrad*>(node)) {
        leaves.push_back(end->variable);
      }
      continue;
    }
    for (const torch::autograd::Edge& edge : node->next_edges()) {
      if (edge.function && seen.insert(&*edge.function).second) {
        open.push_back(&*edge.function);
      }
    }
  }
  return leaves;
}

}  // namespace brim::detail
