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
BRIM_LAYER(ReLU, RecomputingLayer, at::Tensor);
/// torch::nn::ReLU6 that keeps one bit per element for backward.
BRIM_LAYER(ReLU6, RecomputingLayer, at::Tensor);
/// torch::nn::LeakyReLU that keeps one bit per element for backward.
BRIM_LAYER(LeakyReLU, RecomputingLayer, at::Tensor);
/// torch::nn::Hardtanh that keeps one bit per element for backward.
BRIM_LAYER(Hardtanh, RecomputingLayer, at::Tensor);
/// torch::nn::Threshold that keeps one bit per element for backward.
BRIM_LAYER(Threshold, RecomputingLayer, at::Tensor);
/// torch::nn::GELU that keeps its input.
BRIM_LAYER(GELU, RecomputingLayer, const at::Tensor&);
/// torch::nn::SiLU that keeps its input.
BRIM_LAYER(SiLU, RecomputingLayer, const at::Tensor&);
/// torch::nn::Mish that keeps its input.
BRIM_LAYER(Mish, RecomputingLayer, const at::Tensor&);
/// torch::nn::ELU that keeps its input.
BRIM_LAYER(ELU, RecomputingLayer, at::Tensor);
/// torch::nn::CELU that keeps its input.
BRIM_LAYER(CELU, RecomputingLayer, at::Tensor);
/// torch::nn::SELU that keeps its input.
BRIM_LAYER(SELU, RecomputingLayer, at::Tensor);
/// torch::nn::LogSigmoid that keeps its input, where torch keeps two tensors on the CPU.
BRIM_LAYER(LogSigmoid, RecomputingLayer, const at::Tensor&);

/// torch::nn::Softsign that keeps its input, where torch keeps two tensors. Not in a region, which
/// would see only what torch composes it of.
struct BRIM_API SoftsignImpl : RecomputingLayer<SoftsignImpl, torch::nn::SoftsignImpl> {
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(const at::Tensor& input) { return functional::softsign(input, recompute); }
};
TORCH_MODULE(Softsign);

/// torch::nn::Softplus that keeps its input.
BRIM_LAYER(Softplus, RecomputingLayer, const at::Tensor&);
/// torch::nn::Sigmoid that keeps its output.
BRIM_LAYER(Sigmoid, RecomputingLayer, const at::Tensor&);
/// torch::nn::Tanh that keeps its output.
BRIM_LAYER(Tanh, RecomputingLayer, const at::Tensor&);

/// Keeps one bit per element if its weight is frozen.
BRIM_LAYER(PReLU, Layer, const at::Tensor&);

// NOLINTEND(bugprone-derived-method-shadowing-base-method,performance-unnecessary-value-param)

/// An activation that torch::nn does not have.
template <class Impl>
class BRIM_API OwnActivation : public torch::nn::Cloneable<Impl> {
 public:
  // NOLINTNEXTLINE(bugprone-crtp-constructor-accessibility): as the base classes of torch::nn
  explicit OwnActivation(bool in_place = false) : inplace(in_place) {}

  void reset() override {}

  bool inplace;
  Again recompute = false;  // as in RecomputingLayer
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
using Activations =
    Layers<ReLUImpl, ReLU6Impl, LeakyReLUImpl, HardtanhImpl, ThresholdImpl, GELUImpl, SiLUImpl,
           MishImpl, ELUImpl, CELUImpl, SELUImpl, LogSigmoidImpl, SoftsignImpl, SoftplusImpl,
           SigmoidImpl, TanhImpl, PReLUImpl>;

}  // namespace brim::nn
