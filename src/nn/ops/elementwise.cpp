#include "nn/ops/elementwise.h"

#include <ATen/ops/clamp.h>
#include <ATen/ops/erf.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/hardswish.h>
#include <ATen/ops/hardswish_backward.h>
#include <ATen/ops/mish.h>
#include <ATen/ops/mish_backward.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sigmoid_backward.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/sqrt.h>
#include <ATen/ops/square.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/tanh_backward.h>
#include <ATen/ops/threshold_backward.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

namespace brim::nn {
namespace {

using at::Tensor;

const double kRootOf2OverPi = std::sqrt(2.0 / std::numbers::pi);

// The order of operators in the composed ones is that of the models' source: it decides the order
// in which autograd adds up the gradient.

Tensor new_gelu(const Tensor& x) {
  const Tensor half = x.mul(0.5);
  return half.mul(at::tanh(x.add(at::pow(x, 3.0).mul(0.044715)).mul(kRootOf2OverPi)).add(1.0));
}

/// The type of `grad` is that of the powers.
Tensor new_gelu_grad(const Tensor& grad, const Tensor& x) {
  const auto type = x.scalar_type();
  const Tensor powered = x.to(grad.scalar_type());
  const Tensor inner = x.add(at::pow(powered, 3.0).mul(0.044715)).mul(kRootOf2OverPi);
  const Tensor tanh = at::tanh(inner);
  const Tensor of_half = grad.mul(tanh.add(1.0)).to(type);
  const Tensor of_sum = at::tanh_backward(grad.mul(x.mul(0.5)), tanh).mul(kRootOf2OverPi);
  const Tensor of_power = of_sum.mul(0.044715).mul(at::pow(powered, 2.0).mul(3.0));
  return of_sum.to(type).add(of_power.to(type)).add(of_half.mul(0.5));
}

Tensor fast_gelu(const Tensor& x) {
  const Tensor half = x.mul(0.5);
  const Tensor scaled = x.mul(0.7978845608);
  return half.mul(at::tanh(scaled.mul(x.mul(0.044715).mul(x).add(1.0))).add(1.0));
}

Tensor erf_gelu(const Tensor& x) {
  const Tensor half = x.mul(0.5);
  return half.mul(at::erf(x.div(std::numbers::sqrt2)).add(1.0));
}

/// x * sigmoid(factor * x).
Tensor sigmoid_gated(const Tensor& x, double factor) {
  return x.mul(at::sigmoid(factor == 1.0 ? x : x.mul(factor)));
}

Tensor sigmoid_gated_grad(const Tensor& grad, const Tensor& x, double factor) {
  const Tensor gate = at::sigmoid(factor == 1.0 ? x : x.mul(factor));
  const Tensor of_inner = at::sigmoid_backward(grad.mul(x), gate);
  return grad.mul(gate).add(factor == 1.0 ? of_inner : of_inner.mul(factor));
}

Tensor relu_squared_grad(const Tensor& grad, const Tensor& x) {
  const Tensor relu = at::relu(x);
  return at::threshold_backward(grad.mul(relu.to(grad.scalar_type()).mul(2.0)).to(x.scalar_type()),
                                relu, 0);
}

Tensor laplace(const Tensor& x) {
  return at::erf(x.sub(0.707107).div(0.282095 * std::numbers::sqrt2)).add(1.0).mul(0.5);
}

constexpr auto kAsGate = Elementwise::Fused::as_gate;
constexpr auto kAlone = Elementwise::Fused::alone_too;
constexpr bool kPowers = true;

constexpr Elementwise kKnown[] = {
    {"silu", [](const Tensor& x) { return at::silu(x); },
     [](const Tensor& grad, const Tensor& x) { return at::silu_backward(grad, x); }, kAsGate},
    {"gelu", [](const Tensor& x) { return at::gelu(x); },
     [](const Tensor& grad, const Tensor& x) { return at::gelu_backward(grad, x); }, kAsGate},
    {"gelu_tanh", [](const Tensor& x) { return at::gelu(x, "tanh"); },
     [](const Tensor& grad, const Tensor& x) { return at::gelu_backward(grad, x, "tanh"); },
     kAsGate},
    {"relu", [](const Tensor& x) { return at::relu(x); },
     [](const Tensor& grad, const Tensor& x) { return at::threshold_backward(grad, x, 0); },
     kAsGate},
    {"sigmoid", [](const Tensor& x) { return at::sigmoid(x); },
     [](const Tensor& grad, const Tensor& x) { return at::sigmoid_backward(grad, at::sigmoid(x)); },
     kAsGate},
    {"tanh", [](const Tensor& x) { return at::tanh(x); },
     [](const Tensor& grad, const Tensor& x) { return at::tanh_backward(grad, at::tanh(x)); }},
    {"mish", [](const Tensor& x) { return at::mish(x); },
     [](const Tensor& grad, const Tensor& x) { return at::mish_backward(grad, x); }},
    {"hardswish", [](const Tensor& x) { return at::hardswish(x); },
     [](const Tensor& grad, const Tensor& x) { return at::hardswish_backward(grad, x); }},
    {"new_gelu", new_gelu, new_gelu_grad, kAlone, kPowers},
    {"quick_gelu", [](const Tensor& x) { return sigmoid_gated(x, 1.702); },
     [](const Tensor& grad, const Tensor& x) { return sigmoid_gated_grad(grad, x, 1.702); },
     kAlone},
    {"swish", [](const Tensor& x) { return sigmoid_gated(x, 1.0); },
     [](const Tensor& grad, const Tensor& x) { return sigmoid_gated_grad(grad, x, 1.0); }, kAlone},
    {"relu_squared", [](const Tensor& x) { return at::square(at::relu(x)); }, relu_squared_grad,
     kAlone, kPowers},
    {"fast_gelu", fast_gelu},
    {"erf_gelu", erf_gelu},
    {"clipped_gelu", [](const Tensor& x) { return at::clamp(at::gelu(x), -10, 10); }},
    {"softplus_mish", [](const Tensor& x) { return x.mul(at::tanh(at::softplus(x))); }},
    {"sqrt_softplus", [](const Tensor& x) { return at::sqrt(at::softplus(x)); }},
    {"laplace", laplace},
};

std::string all_names() {
  std::string names;
  for (const Elementwise& each : kKnown) {
    names.append(names.empty() ? "" : ", ").append(each.name);
  }
  return names;
}

}  // namespace

const Elementwise& elementwise(std::string_view name) {
  const auto* const found = std::ranges::find(kKnown, name, &Elementwise::name);
  TORCH_CHECK_VALUE(found != std::end(kKnown), "activation must be one of ", all_names(), "; got ",
                    name);
  return *found;
}

}  // namespace brim::nn
