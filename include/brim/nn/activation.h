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
struct BRIM_API ReLUImpl : RecomputingLayer<ReLUImpl, torch::nn::ReLUImpl> {
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(at::Tensor input) {
    return functional::relu(input, options.inplace(), recompute);
  }
};
TORCH_MODULE(ReLU);

/// torch::nn::ReLU6 that keeps one bit per element for backward.
struct BRIM_API ReLU6Impl : RecomputingLayer<ReLU6Impl, torch::nn::ReLU6Impl> {
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(at::Tensor input) {
    return functional::relu6(input, options.inplace(), recompute);
  }
};
TORCH_MODULE(ReLU6);

/// torch::nn::LeakyReLU that keeps one bit per element for backward.
struct BRIM_API LeakyReLUImpl : RecomputingLayer<LeakyReLUImpl, torch::nn::LeakyReLUImpl> {
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(at::Tensor input) {
    return functional::leaky_relu(input, options.negative_slope(), options.inplace(), recompute);
  }
};
TORCH_MODULE(LeakyReLU);

/// torch::nn::Hardtanh that keeps one bit per element for backward.
struct BRIM_API HardtanhImpl : RecomputingLayer<HardtanhImpl, torch::nn::HardtanhImpl> {
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(at::Tensor input) {
    return functional::hardtanh(input, options.min_val(), options.max_val(), options.inplace(),
                                recompute);
  }
};
TORCH_MODULE(Hardtanh);

/// torch::nn::GELU that keeps its input.
struct BRIM_API GELUImpl : RecomputingLayer<GELUImpl, torch::nn::GELUImpl> {
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(const at::Tensor& input) {
    return functional::gelu(input, options.approximate(), recompute);
  }
};
TORCH_MODULE(GELU);

/// torch::nn::SiLU that keeps its input.
struct BRIM_API SiLUImpl : RecomputingLayer<SiLUImpl, torch::nn::SiLUImpl> {
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(const at::Tensor& input) { return functional::silu(input, false, recompute); }
};
TORCH_MODULE(SiLU);

/// torch::nn::Mish that keeps its input.
struct BRIM_API MishImpl : RecomputingLayer<MishImpl, torch::nn::MishImpl> {
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(const at::Tensor& input) { return functional::mish(input, false, recompute); }
};
TORCH_MODULE(Mish);

/// torch::nn::ELU that keeps its input.
struct BRIM_API ELUImpl : RecomputingLayer<ELUImpl, torch::nn::ELUImpl> {
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(at::Tensor input) {
    return functional::elu(input, options.alpha(), options.inplace(), recompute);
  }
};
TORCH_MODULE(ELU);

/// torch::nn::Softplus that keeps its input.
struct BRIM_API SoftplusImpl : RecomputingLayer<SoftplusImpl, torch::nn::SoftplusImpl> {
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(const at::Tensor& input) {
    return functional::softplus(input, options.beta(), options.threshold(), recompute);
  }
};
TORCH_MODULE(Softplus);

/// torch::nn::Sigmoid that keeps its output.
struct BRIM_API SigmoidImpl : RecomputingLayer<SigmoidImpl, torch::nn::SigmoidImpl> {
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(const at::Tensor& input) { return functional::sigmoid(input, recompute); }
};
TORCH_MODULE(Sigmoid);

/// torch::nn::Tanh that keeps its output.
struct BRIM_API TanhImpl : RecomputingLayer<TanhImpl, torch::nn::TanhImpl> {
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(const at::Tensor& input) { return functional::tanh(input, recompute); }
};
TORCH_MODULE(Tanh);

/// Keeps one bit per element if its weight is frozen.
struct BRIM_API PReLUImpl : Layer<PReLUImpl, torch::nn::PReLUImpl> {
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
struct BRIM_API HardsigmoidImpl : OwnActivation<HardsigmoidImpl> {
  using OwnActivation::OwnActivation;

  at::Tensor forward(const at::Tensor& input) {
    return functional::hardsigmoid(input, inplace, recompute);
  }
};
TORCH_MODULE(Hardsigmoid);

/// `torch.nn.Hardswish`, which torch::nn lacks; keeps its input.
struct BRIM_API HardswishImpl : OwnActivation<HardswishImpl> {
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
