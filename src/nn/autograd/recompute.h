#pragma once

#include "nn/autograd/node.h"

// A layer that needs its input only for the gradient of its weight may ask the layer before to give
// that value again in backward, and keep nothing. Autograd's graph says how the value was made:
//
//   conv (asks)  ->  relu  ->  add  ->  batch norm, which keeps its own input anyway
//                                  \->  relu of the block before  ->  ...
//
// Known are brim's own layers, and between two of them one sum of two tensors or one change of
// type: of torch's own nodes nobody can tell whether their result was written to before it went on.
// Everything that can be asked lies before the asking layer, so backward has not come to it yet and
// nothing of it is released.

namespace brim::nn {

/// How many layers in a row must run again until recompute() has the value that `node` made;
/// nothing for null and unknown nodes. For forward, where the graph behind `node` is complete.
/// @param value as the asking layer saw it: something else than `node` made cannot be given again
[[nodiscard]] std::optional<int> layers_to_recompute(const Node* node, const TensorVersion& value);

/// Whether so many are worth it. In a chain of residual blocks every value on the way is held until
/// backward comes to it: without an end, a deep network would need more memory than it saves.
[[nodiscard]] constexpr bool are_few(std::optional<int> layers) { return layers && *layers <= 8; }

/// The layers for the input of a layer and the layer itself. Asked for once: in a deep network the
/// answer goes through all the layers before.
class LayersBefore {
 public:
  /// @param input as the layer saw it at its forward
  explicit LayersBefore(const TensorVersion& input) : input_(input) {}

  [[nodiscard]] std::optional<int> with(const Node* producer) const {
    if (!is_known_) {
      layers_ = layers_to_recompute(producer, input_);
      is_known_ = true;
    }
    return layers_ ? std::optional(*layers_ + 1) : std::nullopt;
  }

 private:
  TensorVersion input_;
  mutable bool is_known_ = false;
  mutable std::optional<int> layers_;
};

/// Tells the layers that recompute() will ask. @returns false where they cannot promise any more
[[nodiscard]] bool prepare_to_recompute(Node& node);

/// The value that `node` made, bit for bit. Under grad mode (double backward) the result is part of
/// the graph. @throws c10::Error if what it needs was released.
[[nodiscard]] at::Tensor recompute(Node& node);

/// The same, cut off below zero: with fewer passes over memory where the layers know how.
[[nodiscard]] at::Tensor recompute_relu(Node& node);

}  // namespace brim::nn
