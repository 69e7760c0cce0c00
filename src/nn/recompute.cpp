#include "nn/recompute.h"

#include <ATen/ops/add.h>
#include <ATen/ops/relu.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <algorithm>

namespace brim::nn {
namespace {

using torch::autograd::Edge;
using torch::autograd::generated::AddBackward0;
using torch::autograd::generated::ToCopyBackward0;

// Sums and casts between two layers that are followed: a value that is the sum of many is not cheap
// to give again, and sums of sums have more paths than nodes.
constexpr int kMostBetweenLayers = 16;

std::optional<int> layers_of(const Node* node, int& left);

std::optional<int> layers_of(const Edge& edge, int& left) {
  return edge.is_valid() && edge.input_nr == 0 ? layers_of(edge.function.get(), left)
                                               : std::nullopt;
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

std::optional<int> layers_of_sum(const AddBackward0& sum, int& left) {
  if (sum.num_outputs() != 2) {
    return std::nullopt;
  }
  const auto first = layers_of(sum.next_edge(0), left);
  const auto second = first ? layers_of(sum.next_edge(1), left) : std::nullopt;
  return second && is_plain(sum) ? std::optional(std::max(*first, *second)) : std::nullopt;
}

std::optional<int> layers_of_cast(const ToCopyBackward0& cast, int& left) {
  const Edge& edge = cast.next_edge(0);
  const auto layers = layers_of(edge, left);
  const bool stays =
      layers && edge.function->input_metadata(0).device() == cast.input_metadata(0).device();
  return stays ? layers : std::nullopt;
}

std::optional<int> layers_of(const Node* node, int& left) {
  if (const auto* const layer = dynamic_cast<const SavingNode*>(node)) {
    return layer->layers_to_recompute();
  }
  if (--left < 0) {
    return std::nullopt;
  }
  if (const auto* const sum = dynamic_cast<const AddBackward0*>(node)) {
    return layers_of_sum(*sum, left);
  }
  if (const auto* const cast = dynamic_cast<const ToCopyBackward0*>(node)) {
    return layers_of_cast(*cast, left);
  }
  return std::nullopt;
}

}  // namespace

std::optional<int> layers_to_recompute(const Node* node) {
  int left = kMostBetweenLayers;
  return layers_of(node, left);
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
