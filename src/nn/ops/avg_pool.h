#pragma once

#include <ATen/core/Tensor.h>

#include "nn/ops/pool_geometry.h"

// Average pooling is linear: backward needs the sizes of the input and nothing of its values.

namespace brim::nn::cpu {

/// Gradient of the input. All tensors are dense, in the order that the geometry says.
void avg_pool_backward(const at::Tensor& grad, at::Tensor& grad_input, const PoolGeometry& geometry,
                       const AvgRule& rule);

}  // namespace brim::nn::cpu
