#pragma once

#include <brim/nn/layer.h>
#include <torch/nn/modules/linear.h>

namespace brim::nn {

/// Keeps its input only where the weight needs a gradient.
class BRIM_API LinearImpl : public Layer<LinearImpl, torch::nn::LinearImpl> {
 public:
  using Layer::Layer;

  at::Tensor forward(const at::Tensor& input);

  /// Keep no input where the layer before can give it again cheaply (functional.h, `linear`).
  bool recompute = false;
};
TORCH_MODULE(Linear);

}  // namespace brim::nn
