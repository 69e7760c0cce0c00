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
// in which autograd adds up the gradient. No `mul_` by a number: in half types torch rounds the
// number there, and not in `mul`.

Tensor new_gelu(const Tensor& x) {
  const Tensor half = x.mul(0.5);
  return half.mul(at::tanh(x.add(at::pow(x, 3.0).mul(0.044715)).mul(kRootOf2OverPi)).add(1.0));
}

/// The type of `grad` is that of the powers.
Tensor new_gelu_grad(const Tensor& grad, const Tensor& x, Tensor* y) {
  const auto type = x.scalar_type();
  const Tensor powered = x.to(grad.scalar_type());
  const Tensor half = x.mul(0.5);
  const Tensor tanh = at::tanh(x.add(at::pow(powered, 3.0).mul(0.044715)).mul(kRootOf2OverPi));
  const Tensor right = tanh.add(1.0);
  if (y != nullptr) {
    *y = half.mul(right);
  }
  const Tensor of_half = grad.mul(right).to(type);
  const Tensor of_sum = at::tanh_backward(grad.mul(half), tanh).mul(kRootOf2OverPi);
  const Tensor of_power = of_sum.mul(0.044715).mul_(at::pow(powered, 2.0).mul(3.0));
  return of_sum.to(type).add(of_power.to(type)).add_(of_half.mul(0.5));
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

Tensor sigmoid_gated_grad(const Tensor& grad, const Tensor& x, Tensor* y, double factor) {
  const Tensor gate = at::sigmoid(factor == 1.0 ? x : x.mul(factor));
  if (y != nullptr) {
    *y = x.mul(gate);
  }
  const Tensor of_inner = at::sigmoid_backward(grad.mul(x), gate);
  return grad.mul(gate).add_(factor == 1.0 ? of_inner : of_inner.mul(factor));
}

Tensor relu_squared_grad(const Tensor& grad, const Tensor& x, Tensor* y) {
  const Tensor relu = at::relu(x);
  const Tensor powered = relu.to(grad.scalar_type());
  if (y != nullptr) {
    *y = at::square(powered);
  }
  return at::threshold_backward(grad.mul(powered.mul(2.0)).to(x.scalar_type()), relu, 0);
}

/// For those whose gradient reads the output.
template <auto Value, auto Grad>
Tensor grad_from_output(const Tensor& grad, const Tensor& x, Tensor* y) {
  const Tensor output = Value(x);
  const Tensor result = Grad(grad, output);
  if (y != nullptr) {
    *y = output;
  }
  return result;
}

/// For those whose gradient reads the input.
template <auto Value, auto Grad>
Tensor grad_from_input(const Tensor& grad, const Tensor& x, Tensor* y) {
  if (y != nullptr) {
    *y = Value(x);
  }
  return Grad(grad, x);
}

Tensor laplace(const Tensor& x) {
  return at::erf(x.sub(0.707107).div(0.282095 * std::numbers::sqrt2)).add(1.0).mul(0.5);
}

constexpr auto kAsGate = Elementwise::Fused::as_gate;
constexpr auto kAlone = Elementwise::Fused::alone_too;
constexpr bool kPowers = true;

Tensor gelu(const Tensor& x) { return at::gelu(x); }
Tensor gelu_grad(const Tensor& grad, const Tensor& x) { return at::gelu_backward(grad, x); }
Tensor gelu_tanh(const Tensor& x) { return at::gelu(x, "tanh"); }
Tensor gelu_tanh_grad(const Tensor& grad, const Tensor& x) {
  return at::gelu_backward(grad, x, "tanh");
}
Tensor relu_grad(const Tensor& grad, const Tensor& y) { return at::threshold_backward(grad, y, 0); }

constexpr Elementwise kKnown[] = {
    {"silu", at::silu, grad_from_input<at::silu, at::silu_backward>, kAsGate},
    {"gelu", gelu, grad_from_input<gelu, gelu_grad>, kAsGate},
    {"gelu_tanh", gelu_tanh, grad_from_input<gelu_tanh, gelu_tanh_grad>, kAsGate},
    {"relu", at::relu, grad_from_output<at::relu, relu_grad>, kAsGate},
    {"sigmoid", at::sigmoid, grad_from_output<at::sigmoid, at::sigmoid_backward>, kAsGate},
    {"tanh", at::tanh, grad_from_output<at::tanh, at::tanh_backward>},
    {"mish", at::mish, grad_from_input<at::mish, at::mish_backward>},
    {"hardswish", at::hardswish, grad_from_input<at::hardswish, at::hardswish_backward>},
    {"new_gelu", new_gelu, new_gelu_grad, kAlone, kPowers},
    {"quick_gelu", [](const Tensor& x) { return sigmoid_gated(x, 1.702); },
     [](const Tensor& grad, const Tensor& x, Tensor* y) {
       return sigmoid_gated_grad(grad, x, y, 1.702);
     },
     kAlone},
    {"swish", [](const Tensor& x) { return sigmoid_gated(x, 1.0); },
     [](const Tensor& grad, const Tensor& x, Tensor* y) {
       return sigmoid_gated_grad(grad, x, y, 1.0);
     },
     kAlone},
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
