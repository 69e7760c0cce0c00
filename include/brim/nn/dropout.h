#pragma once

#include <brim/nn/layer.h>
#include <torch/nn/modules/dropout.h>

namespace brim::nn {

// Torch's forward is not virtual: layer.h says what follows from that.
// NOLINTBEGIN(bugprone-derived-method-shadowing-base-method,performance-unnecessary-value-param)

/// Keeps one bit per element. Draws the same random numbers as torch::nn::Dropout.
BRIM_LAYER(Dropout, Layer, at::Tensor);

// NOLINTEND(bugprone-derived-method-shadowing-base-method,performance-unnecessary-value-param)

}  // namespace brim::nn
