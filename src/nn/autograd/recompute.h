#pragma once

#include <algorithm>

#include <torch/csrc/autograd/edge.h>

#include "nn/autograd/node.h"

// A layer that needs its input only for the gradient of its weight may keep nothing and ask the
// layer before to recompute that value in backward. Autograd's graph says how the value was made:
//
//   conv (asks)  ->  relu  ->  add  ->  batch norm, which keeps its own input anyway
//                                  \->  relu of the block before  ->  ...
//
// Known are brim's own layers, torch's attention (which keeps its output), any number of views and
// splits, and between two layers one sum of two tensors or one copy (a change of type, of strides):
// after torch's other nodes we cannot know whether the result was written to. Everything that can
// be asked lies before the asking layer, so backward has not reached it and it has released
// nothing.

namespace brim::nn {

using torch::autograd::Edge;

/// Where a value was made: a node, and which of its outputs the value is. A leaf has no node.
[[nodiscard]] inline Edge origin_of(const at::Tensor& value) {
  return {value.grad_fn(), static_cast<std::uint32_t>(value.output_nr())};
}

/// How many layers in a row recompute() must run to get the value that was made at `origin`;
/// nothing for unknown nodes and for none. For forward, when the graph that leads there is
/// complete.
/// @param value as the asking layer saw it: if it is not what was made, it cannot be recomputed
[[nodiscard]] std::optional<int> layers_to_recompute(const Edge& origin,
                                                     const TensorVersion& value);

/// Whether that is worth it. In a chain of residual blocks every value on the way is held until
/// backward reaches it: without a limit, a deep network would need more memory than it saves.
[[nodiscard]] constexpr bool are_few(std::optional<int> layers) { return layers && *layers <= 8; }

/// The most of two numbers of layers, for a value made of two.
[[nodiscard]] constexpr std::optional<int> most_layers(std::optional<int> first,
                                                       std::optional<int> second) {
  return first && second ? std::optional(std::max(*first, *second)) : std::nullopt;
}

/// The number of layers for the input of a layer and the layer itself. Computed once: in a deep
/// network the answer goes through all the layers before.
class LayersBefore {
 public:
  /// @param input as the layer saw it at its forward
  explicit LayersBefore(const TensorVersion& input) : input_(input) {}

  /// For the input alone.
  [[nodiscard]] std::optional<int> without(const Edge& origin) const {
    if (!is_known_) {
      layers_ = layers_to_recompute(origin, input_);
      is_known_ = true;
    }
    return layers_;
  }

  [[nodiscard]] std::optional<int> with(const Edge& origin) const {
    const auto layers = without(origin);
    return layers ? std::optional(*layers + 1) : std::nullopt;
  }

 private:
  TensorVersion input_;
  mutable bool is_known_ = false;
  mutable std::optional<int> layers_;
};

/// Whether a product made `value` that can run again, through views and at most one copy: to ask
/// for it takes more time than to ask other layers.
[[nodiscard]] bool is_from_product(const at::Tensor& value);

/// Arithmetic operations for each element of `value` that asking for it takes, of the layer that
/// made it; see SavingNode::work().
[[nodiscard]] double work_to_recompute(const at::Tensor& value);

/// Whether to ask any layer that saves_if_asked(). `value` is its whole output, or a view of it,
/// which would keep the whole too.
[[nodiscard]] Again is_worth_asking_for(const at::Tensor& value);

/// Prepares the layers that recompute() will run, see SavingNode::prepare_to_recompute.
/// @returns false if one of them cannot
[[nodiscard]] bool prepare_to_recompute(Node& node, bool copies);

/// For a loss, whose maker runs again also where it does not offer that to others.
[[nodiscard]] double work_of_maker(const at::Tensor& value);

/// For a loss: whether the layer that made `value`, through views and at most one copy, prepared to
/// run again (see SavingNode::prepare_for_loss). recompute() of the value's own node then does so.
[[nodiscard]] bool prepare_maker_for_loss(const at::Tensor& value, bool copies);

/// The value that was made there, bit for bit, and without a place in the graph, also under grad
/// mode (double backward): whoever holds it puts it where the first one was. A second way there
/// would have gradients of its own, which round before they are added to those of the first.
/// @param strides to have, if any are given: a kernel may sum in the order of memory
/// @throws c10::Error if what it needs was released.
[[nodiscard]] at::Tensor recompute(const Edge& origin, c10::SymIntArrayRef strides = {});

/// relu() of the same, with fewer passes over memory where the layers can. With the strides that it
/// has of an input with these, if any are given.
[[nodiscard]] at::Tensor recompute_relu(const Edge& origin, c10::SymIntArrayRef strides);

}  // namespace brim::nn
