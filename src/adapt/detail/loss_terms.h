#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <cstdint>
#include <vector>

namespace brim::detail {

/// A reduction that a loss is made of.
struct LossTerm {
  /// What it divides by: elements of a mean, the total weight of a cross entropy (labels that are
  /// not ignored, by the weights of their classes), what a sum is divided by.
  double count = 0;
  std::int64_t elements = 0;   ///< the number of what is added up
  bool is_sum = false;         ///< that only factors divide
  torch::autograd::Edge at{};  ///< where it is in the graph
};

/// What the graph of a loss shows of how it was reduced.
struct LossTerms {
  std::vector<LossTerm> terms;
  bool is_complete = true;  ///< the loss is a sum of these terms, by constant factors
};

/// Reads the terms from the graph of a loss of one element. Values on an accelerator are waited for
/// only where the count depends on them.
[[nodiscard]] LossTerms loss_terms(const at::Tensor& loss);

}  // namespace brim::detail
