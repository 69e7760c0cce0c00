#pragma once

#include <brim/nn/layer.h>
#include <torch/nn/modules/dropout.h>

namespace brim::nn {

// Torch's forward is not virtual: layer.h says what follows from that.
// NOLINTBEGIN(bugprone-derived-method-shadowing-base-method)

/// Keeps one bit per element. Draws the same random numbers as torch::nn::Dropout.
struct BRIM_API DropoutImpl : Layer<DropoutImpl, torch::nn::DropoutImpl> {
  using Layer::Layer;

  at::Tensor forward(at::Tensor input) { return in_region(input); }
};
TORCH_MODULE(Dropout);

// NOLINTEND(bugprone-derived-method-shadowing-base-method)

}  // namespace brim::nn
