#pragma once

#include <brim/nn/functional.h>
#include <brim/nn/layer.h>
#include <torch/nn/modules/activation.h>

/// Activations that keep one bit per element, or nothing where the next layer keeps their output.
/// Those that need their input or output for backward keep it, as in torch::nn: nothing smaller is
/// exact.

namespace brim::nn {

// Torch's forward is not virtual: layer.h says what follows from that. By value where torch::nn
// takes it so: the signature decides what an AnyModule accepts.
// NOLINTBEGIN(bugprone-derived-method-shadowing-base-method,performance-unnecessary-value-param)

/// torch::nn::ReLU that keeps one bit per element for backward, or nothing where the next layer
/// keeps its output.
class BRIM_API ReLUImpl : public RecomputingLayer<ReLUImpl, torch::nn::ReLUImpl> {
 public:
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(at::Tensor input) {
    return functional::relu(input, options.inplace(), recompute);
  }
};
TORCH_MODULE(ReLU);

/// torch::nn::ReLU6 that keeps one bit per element for backward.
class BRIM_API ReLU6Impl : public RecomputingLayer<ReLU6Impl, torch::nn::ReLU6Impl> {
 public:
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(at::Tensor input) {
    return functional::relu6(input, options.inplace(), recompute);
  }
};
TORCH_MODULE(ReLU6);

/// torch::nn::LeakyReLU that keeps one bit per element for backward.
class BRIM_API LeakyReLUImpl : public RecomputingLayer<LeakyReLUImpl, torch::nn::LeakyReLUImpl> {
 public:
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(at::Tensor input) {
    return functional::leaky_relu(input, options.negative_slope(), options.inplace(), recompute);
  }
};
TORCH_MODULE(LeakyReLU);

/// torch::nn::Hardtanh that keeps one bit per element for backward.
class BRIM_API HardtanhImpl : public RecomputingLayer<HardtanhImpl, torch::nn::HardtanhImpl> {
 public:
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(at::Tensor input) {
    return functional::hardtanh(input, options.min_val(), options.max_val(), options.inplace(),
                                recompute);
  }
};
TORCH_MODULE(Hardtanh);

/// torch::nn::GELU that keeps its input.
class BRIM_API GELUImpl : public RecomputingLayer<GELUImpl, torch::nn::GELUImpl> {
 public:
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(const at::Tensor& input) {
    return functional::gelu(input, options.approximate(), recompute);
  }
};
TORCH_MODULE(GELU);

/// torch::nn::SiLU that keeps its input.
class BRIM_API SiLUImpl : public RecomputingLayer<SiLUImpl, torch::nn::SiLUImpl> {
 public:
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(const at::Tensor& input) { return functional::silu(input, false, recompute); }
};
TORCH_MODULE(SiLU);

/// torch::nn::Mish that keeps its input.
class BRIM_API MishImpl : public RecomputingLayer<MishImpl, torch::nn::MishImpl> {
 public:
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(const at::Tensor& input) { return functional::mish(input, false, recompute); }
};
TORCH_MODULE(Mish);

/// torch::nn::ELU that keeps its input.
class BRIM_API ELUImpl : public RecomputingLayer<ELUImpl, torch::nn::ELUImpl> {
 public:
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(at::Tensor input) {
    return functional::elu(input, options.alpha(), options.inplace(), recompute);
  }
};
TORCH_MODULE(ELU);

/// torch::nn::Softplus that keeps its input.
class BRIM_API SoftplusImpl : public RecomputingLayer<SoftplusImpl, torch::nn::SoftplusImpl> {
 public:
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(const at::Tensor& input) {
    return functional::softplus(input, options.beta(), options.threshold(), recompute);
  }
};
TORCH_MODULE(Softplus);

/// torch::nn::Sigmoid that keeps its output.
class BRIM_API SigmoidImpl : public RecomputingLayer<SigmoidImpl, torch::nn::SigmoidImpl> {
 public:
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(const at::Tensor& input) { return functional::sigmoid(input, recompute); }
};
TORCH_MODULE(Sigmoid);

/// torch::nn::Tanh that keeps its output.
class BRIM_API TanhImpl : public RecomputingLayer<TanhImpl, torch::nn::TanhImpl> {
 public:
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(const at::Tensor& input) { return functional::tanh(input, recompute); }
};
TORCH_MODULE(Tanh);

/// Keeps one bit per element if its weight is frozen.
class BRIM_API PReLUImpl : public Layer<PReLUImpl, torch::nn::PReLUImpl> {
 public:
  using Layer::Layer;

  at::Tensor forward(const at::Tensor& input) { return functional::prelu(input, weight); }
};
TORCH_MODULE(PReLU);

// NOLINTEND(bugprone-derived-method-shadowing-base-method,performance-unnecessary-value-param)

/// An activation that torch::nn does not have.
template <class Impl>
class BRIM_API OwnActivation : public torch::nn::Cloneable<Impl> {
 public:
  // NOLINTNEXTLINE(bugprone-crtp-constructor-accessibility): as the base classes of torch::nn
  explicit OwnActivation(bool in_place = false) : inplace(in_place) {}

  void reset() override {}

  bool inplace;
  bool recompute = false;  // as in RecomputingLayer
};

/// `torch.nn.Hardsigmoid`, which torch::nn lacks; keeps one bit per element for backward.
class BRIM_API HardsigmoidImpl : public OwnActivation<HardsigmoidImpl> {
 public:
  using OwnActivation::OwnActivation;

  at::Tensor forward(const at::Tensor& input) {
    return functional::hardsigmoid(input, inplace, recompute);
  }
};
TORCH_MODULE(Hardsigmoid);

/// `torch.nn.Hardswish`, which torch::nn lacks; keeps its input.
class BRIM_API HardswishImpl : public OwnActivation<HardswishImpl> {
 public:
  using OwnActivation::OwnActivation;

  at::Tensor forward(const at::Tensor& input) {
    return functional::hardswish(input, inplace, recompute);
  }
};
TORCH_MODULE(Hardswish);

/// For convert(): those with a layer of torch::nn.
using Activations = Layers<ReLUImpl, ReLU6Impl, LeakyReLUImpl, HardtanhImpl, GELUImpl, SiLUImpl,
                           MishImpl, ELUImpl, SoftplusImpl, SigmoidImpl, TanhImpl, PReLUImpl>;

}  // namespace brim::nn
