#include "nn/autograd/recompute.h"

#include <ATen/ops/add.h>
#include <ATen/ops/relu.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <algorithm>

namespace brim::nn {
namespace {

using torch::autograd::Edge;
using torch::autograd::generated::AddBackward0;
using torch::autograd::generated::ToCopyBackward0;

/// The layer at the end of an edge, if it can be asked.
const SavingNode* layer_at(const Edge& edge) {
  const auto* const layer =
      edge.input_nr == 0 ? dynamic_cast<const SavingNode*>(edge.function.get()) : nullptr;
  return layer != nullptr && layer->is_near() ? layer : nullptr;
}

/// A plain sum: no factor, no promotion of types, no broadcasting.
bool is_plain(const AddBackward0& sum) {
  const auto& result = sum.input_metadata(0);
  const auto like_result = [&](const Edge& edge) {
    const auto& operand = edge.function->input_metadata(edge.input_nr);
    return operand.shape_as_dim_vector() == result.shape_as_dim_vector() &&
           operand.dtype() == result.dtype();
  };
  return sum.alpha.equal(1) && like_result(sum.next_edge(0)) && like_result(sum.next_edge(1));
}

/// Whether nobody wrote to the operands before the sum, or to the sum after it. The second
/// operand's memory is never the sum's; the first one's is where the sum was made in place.
bool is_what_was_added(const SavingNode& first, const SavingNode& second,
                       const TensorVersion& sum) {
  if (!second.is_untouched()) {
    return false;
  }
  return sum.memory == first.output().memory ? sum.version == first.output().version + 1
                                             : sum.version == 0 && first.is_untouched();
}

std::optional<int> layers_of_sum(const AddBackward0& sum, const TensorVersion& value) {
  if (sum.num_outputs() != 2) {
    return std::nullopt;
  }
  const SavingNode* const first = layer_at(sum.next_edge(0));
  const SavingNode* const second = layer_at(sum.next_edge(1));
  if (first == nullptr || second == nullptr || !is_what_was_added(*first, *second, value) ||
      !is_plain(sum)) {
    return std::nullopt;
  }
  const auto layers = first->layers_to_recompute();
  const auto others = layers ? second->layers_to_recompute() : std::nullopt;
  return others ? std::optional(std::max(*layers, *others)) : std::nullopt;
}

std::optional<int> layers_of_cast(const ToCopyBackward0& cast, const TensorVersion& value) {
  const SavingNode* const layer = layer_at(cast.next_edge(0));
  const bool is_known = layer != nullptr && layer->is_untouched() && value.version == 0 &&
                        layer->input_metadata(0).device() == cast.input_metadata(0).device();
  return is_known ? layer->layers_to_recompute() : std::nullopt;
}

}  // namespace

std::optional<int> layers_to_recompute(const Node* node, const TensorVersion& value) {
  if (const auto* const layer = dynamic_cast<const SavingNode*>(node)) {
    return layer->is_near() && layer->output() == value ? layer->layers_to_recompute()
                                                        : std::nullopt;
  }
  if (const auto* const sum = dynamic_cast<const AddBackward0*>(node)) {
    return layers_of_sum(*sum, value);
  }
  if (const auto* const cast = dynamic_cast<const ToCopyBackward0*>(node)) {
    return layers_of_cast(*cast, value);
  }
  return std::nullopt;
}

bool prepare_to_recompute(Node& node) {
  if (auto* const layer = dynamic_cast<SavingNode*>(&node)) {
    return layer->prepare_to_recompute();
  }
  return std::all_of(node.next_edges().begin(), node.next_edges().end(),
                     [](const Edge& edge) { return prepare_to_recompute(*edge.function); });
}

at::Tensor recompute(Node& node) {
  if (auto* const layer = dynamic_cast<SavingNode*>(&node)) {
    return layer->recompute();
  }
  if (dynamic_cast<AddBackward0*>(&node) != nullptr) {
    return at::add(recompute(*node.next_edge(0).function), recompute(*node.next_edge(1).function));
  }
  return recompute(*node.next_edge(0).function)
      .to(c10::typeMetaToScalarType(node.input_metadata(0).options().dtype()));
}

at::Tensor recompute_relu(Node& node) {
  if (auto* const layer = dynamic_cast<SavingNode*>(&node)) {
    if (auto fused = layer->recompute_relu({})) {
      return *std::move(fused);
    }
    return at::relu(layer->recompute());
  }
  if (dynamic_cast<AddBackward0*>(&node) == nullptr) {
    return at::relu(recompute(node));
  }
  const at::Tensor added = recompute(*node.next_edge(1).function);
  Node& first = *node.next_edge(0).function;
  if (auto* const layer = dynamic_cast<SavingNode*>(&first)) {
    if (auto fused = layer->recompute_relu(added)) {
      return *std::move(fused);
    }
  }
  return at::relu(at::add(recompute(first), added));
}

}  // namespace brim::nn
