#pragma once

#include "nn/node.h"

// A layer that needs its input only for the gradient of its weight may ask the layer before to give
// that value again in backward, and keep nothing. Autograd's graph says how the value was made:
//
//   conv (asks)  ->  relu  ->  add  ->  batch norm, which keeps its own input anyway
//                                  \->  relu of the block before  ->  ...
//
// Known are brim's own layers, sums of two tensors and changes of type. Everything that can be
// asked lies before the asking layer, so backward has not come to it yet and nothing of it is
// released.

namespace brim::nn {

/// Whether recompute() can give the value that `node` made. Null and unknown nodes cannot. For
/// forward, where the graph behind `node` is complete.
[[nodiscard]] bool can_recompute(const Node* node);

/// The value that `node` made, bit for bit. Under grad mode (double backward) the result is part of
/// the graph. @throws c10::Error if what it needs was released.
[[nodiscard]] at::Tensor recompute(Node& node);

/// The same, cut off below zero: with fewer passes over memory where the layers know how.
[[nodiscard]] at::Tensor recompute_relu(Node& node);

}  // namespace brim::nn
