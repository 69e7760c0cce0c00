#pragma once

#include <brim/nn/layer.h>
#include <torch/nn/modules/activation.h>

/// Activations that keep one bit an element, or nothing where the next layer keeps their output.
/// GELU and SiLU keep their input, as in torch::nn: nothing smaller is exact.

namespace brim::nn {

// Torch's forward is not virtual: layer.h says what follows from that.
// NOLINTBEGIN(bugprone-derived-method-shadowing-base-method)

class BRIM_API ReLUImpl : public Layer<ReLUImpl, torch::nn::ReLUImpl> {
 public:
  using Layer::Layer;

  at::Tensor forward(at::Tensor input);

  /// Keep nothing where the layer before can give its output again in backward.
  bool recompute = false;
};
TORCH_MODULE(ReLU);

class BRIM_API ReLU6Impl : public Layer<ReLU6Impl, torch::nn::ReLU6Impl> {
 public:
  using Layer::Layer;

  at::Tensor forward(at::Tensor input);

  /// Keep nothing where the layer before can give its output again in backward.
  bool recompute = false;
};
TORCH_MODULE(ReLU6);

class BRIM_API LeakyReLUImpl : public Layer<LeakyReLUImpl, torch::nn::LeakyReLUImpl> {
 public:
  using Layer::Layer;

  at::Tensor forward(at::Tensor input);

  /// Keep nothing where the layer before can give its output again in backward.
  bool recompute = false;
};
TORCH_MODULE(LeakyReLU);

class BRIM_API HardtanhImpl : public Layer<HardtanhImpl, torch::nn::HardtanhImpl> {
 public:
  using Layer::Layer;

  at::Tensor forward(at::Tensor input);

  /// Keep nothing where the layer before can give its output again in backward.
  bool recompute = false;
};
TORCH_MODULE(Hardtanh);

class BRIM_API GELUImpl : public Layer<GELUImpl, torch::nn::GELUImpl> {
 public:
  using Layer::Layer;

  at::Tensor forward(const at::Tensor& input);
};
TORCH_MODULE(GELU);

class BRIM_API SiLUImpl : public Layer<SiLUImpl, torch::nn::SiLUImpl> {
 public:
  using Layer::Layer;

  at::Tensor forward(const at::Tensor& input);
};
TORCH_MODULE(SiLU);

// NOLINTEND(bugprone-derived-method-shadowing-base-method)

}  // namespace brim::nn
