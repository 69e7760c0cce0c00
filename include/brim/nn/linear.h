#pragma once

#include <brim/nn/layer.h>
#include <torch/nn/modules/linear.h>

namespace brim::nn {

// Torch's forward is not virtual: layer.h says what follows from that.
// NOLINTBEGIN(bugprone-derived-method-shadowing-base-method)

/// Keeps its input only where the weight needs a gradient.
struct BRIM_API LinearImpl : ProductLayer<LinearImpl, torch::nn::LinearImpl> {
  using ProductLayer::ProductLayer;

  at::Tensor forward(const at::Tensor& input);
};
TORCH_MODULE(Linear);

// NOLINTEND(bugprone-derived-method-shadowing-base-method)

}  // namespace brim::nn
