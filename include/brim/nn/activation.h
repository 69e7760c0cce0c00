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

  at::Tensor forward(at::Tensor input) { return in_region(input); }
};
TORCH_MODULE(ReLU);

/// torch::nn::ReLU6 that keeps one bit per element for backward.
struct BRIM_API ReLU6Impl : RecomputingLayer<ReLU6Impl, torch::nn::ReLU6Impl> {
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(at::Tensor input) { return in_region(input); }
};
TORCH_MODULE(ReLU6);

/// torch::nn::LeakyReLU that keeps one bit per element for backward.
struct BRIM_API LeakyReLUImpl : RecomputingLayer<LeakyReLUImpl, torch::nn::LeakyReLUImpl> {
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(at::Tensor input) { return in_region(input); }
};
TORCH_MODULE(LeakyReLU);

/// torch::nn::Hardtanh that keeps one bit per element for backward.
struct BRIM_API HardtanhImpl : RecomputingLayer<HardtanhImpl, torch::nn::HardtanhImpl> {
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(at::Tensor input) { return in_region(input); }
};
TORCH_MODULE(Hardtanh);

/// torch::nn::Threshold that keeps one bit per element for backward.
struct BRIM_API ThresholdImpl : RecomputingLayer<ThresholdImpl, torch::nn::ThresholdImpl> {
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(at::Tensor input) { return in_region(input); }
};
TORCH_MODULE(Threshold);

/// torch::nn::GELU that keeps its input.
struct BRIM_API GELUImpl : RecomputingLayer<GELUImpl, torch::nn::GELUImpl> {
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(const at::Tensor& input) { return in_region(input); }
};
TORCH_MODULE(GELU);

/// torch::nn::SiLU that keeps its input.
struct BRIM_API SiLUImpl : RecomputingLayer<SiLUImpl, torch::nn::SiLUImpl> {
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(const at::Tensor& input) { return in_region(input); }
};
TORCH_MODULE(SiLU);

/// torch::nn::Mish that keeps its input.
struct BRIM_API MishImpl : RecomputingLayer<MishImpl, torch::nn::MishImpl> {
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(const at::Tensor& input) { return in_region(input); }
};
TORCH_MODULE(Mish);

/// torch::nn::ELU that keeps its input.
struct BRIM_API ELUImpl : RecomputingLayer<ELUImpl, torch::nn::ELUImpl> {
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(at::Tensor input) { return in_region(input); }
};
TORCH_MODULE(ELU);

/// torch::nn::CELU that keeps its input.
struct BRIM_API CELUImpl : RecomputingLayer<CELUImpl, torch::nn::CELUImpl> {
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(at::Tensor input) { return in_region(input); }
};
TORCH_MODULE(CELU);

/// torch::nn::SELU that keeps its input.
struct BRIM_API SELUImpl : RecomputingLayer<SELUImpl, torch::nn::SELUImpl> {
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(at::Tensor input) { return in_region(input); }
};
TORCH_MODULE(SELU);

/// torch::nn::LogSigmoid that keeps its input, where torch keeps two tensors on the CPU.
struct BRIM_API LogSigmoidImpl : RecomputingLayer<LogSigmoidImpl, torch::nn::LogSigmoidImpl> {
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(const at::Tensor& input) { return in_region(input); }
};
TORCH_MODULE(LogSigmoid);

/// torch::nn::Softsign that keeps its input, where torch keeps two tensors.
struct BRIM_API SoftsignImpl : RecomputingLayer<SoftsignImpl, torch::nn::SoftsignImpl> {
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(const at::Tensor& input) { return functional::softsign(input, recompute); }
};
TORCH_MODULE(Softsign);

/// torch::nn::Softplus that keeps its input.
struct BRIM_API SoftplusImpl : RecomputingLayer<SoftplusImpl, torch::nn::SoftplusImpl> {
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(const at::Tensor& input) { return in_region(input); }
};
TORCH_MODULE(Softplus);

/// torch::nn::Sigmoid that keeps its output.
struct BRIM_API SigmoidImpl : RecomputingLayer<SigmoidImpl, torch::nn::SigmoidImpl> {
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(const at::Tensor& input) { return in_region(input); }
};
TORCH_MODULE(Sigmoid);

/// torch::nn::Tanh that keeps its output.
struct BRIM_API TanhImpl : RecomputingLayer<TanhImpl, torch::nn::TanhImpl> {
  using RecomputingLayer::RecomputingLayer;

  at::Tensor forward(const at::Tensor& input) { return in_region(input); }
};
TORCH_MODULE(Tanh);

/// Keeps one bit per element if its weight is frozen.
struct BRIM_API PReLUImpl : Layer<PReLUImpl, torch::nn::PReLUImpl> {
  using Layer::Layer;

  at::Tensor forward(const at::Tensor& input) { return in_region(input); }
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
using Activations =
    Layers<ReLUImpl, ReLU6Impl, LeakyReLUImpl, HardtanhImpl, ThresholdImpl, GELUImpl, SiLUImpl,
           MishImpl, ELUImpl, CELUImpl, SELUImpl, LogSigmoidImpl, SoftsignImpl, SoftplusImpl,
           SigmoidImpl, TanhImpl, PReLUImpl>;

}  // namespace brim::nn
