#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <cstdint>
#include <deque>
#include <unordered_set>
#include <vector>

namespace brim::detail {

/// The leaves that the graph of a loss shows, the nearest first.
/// @param has_16_bits set if a value in the graph has no more, as under autocast; may be null
inline std::vector<at::Tensor> leaves_of(const at::Tensor& loss, bool* has_16_bits = nullptr) {
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
    for (std::uint32_t i = 0; has_16_bits != nullptr && i < node->num_inputs(); ++i) {
      *has_16_bits |= node->input_metadata(i).dtype().itemsize() < 4;
    }
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
