#include "nn/ops/activation.h"

#include <ATen/ops/elu.h>
#include <ATen/ops/elu_backward.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/hardswish.h>
#include <ATen/ops/hardswish_backward.h>
#include <ATen/ops/mish.h>
#include <ATen/ops/mish_backward.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sigmoid_backward.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/softplus_backward.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/tanh_backward.h>
#include <brim/nn/functional.h>

// Activations whose derivative reads the input or the output: nothing smaller is exact.

namespace brim::nn {
namespace {

struct Gelu {
  static constexpr const char* kName = "gelu";
  static constexpr Reads kReads = Reads::input;

  explicit Gelu(std::string_view given) : approximate(given == "tanh" ? "tanh" : "none") {
    TORCH_CHECK(given == approximate, "approximate must be none or tanh, got ", given);
  }

  at::Tensor value(const at::Tensor& x) const { return at::gelu(x, approximate); }
  at::Tensor grad(const at::Tensor& grad, const at::Tensor& input) const {
    return at::gelu_backward(grad, input, approximate);
  }

  const char* approximate;
};

struct Silu {
  static constexpr const char* kName = "silu";
  static constexpr Reads kReads = Reads::input;

  static at::Tensor value(const at::Tensor& x) { return at::silu(x); }
  static at::Tensor& value_(at::Tensor& x) { return at::silu_(x); }
  static at::Tensor grad(const at::Tensor& grad, const at::Tensor& input) {
    if (!at::GradMode::is_enabled()) {
      return at::silu_backward(grad, input);
    }
    const at::Tensor gate = input.sigmoid();  // torch's kernel has no derivative
    return grad.mul(gate).mul(gate.neg().add(1).mul(input).add(1));
  }
};

struct Hardswish {
  static constexpr const char* kName = "hardswish";
  static constexpr Reads kReads = Reads::input;

  static at::Tensor value(const at::Tensor& x) { return at::hardswish(x); }
  static at::Tensor& value_(at::Tensor& x) { return at::hardswish_(x); }
  static at::Tensor grad(const at::Tensor& grad, const at::Tensor& input) {
    return at::hardswish_backward(grad, input);
  }
};

struct Mish {
  static constexpr const char* kName = "mish";
  static constexpr Reads kReads = Reads::input;

  static at::Tensor value(const at::Tensor& x) { return at::mish(x); }
  static at::Tensor& value_(at::Tensor& x) { return at::mish_(x); }
  static at::Tensor grad(const at::Tensor& grad, const at::Tensor& input) {
    if (!at::GradMode::is_enabled()) {
      return at::mish_backward(grad, input);
    }
    const at::Tensor gate = at::tanh(at::softplus(input));  // torch's kernel has no derivative
    return grad.mul(gate.add(input.mul(input.sigmoid()).mul(gate.square().neg().add(1))));
  }
};

struct Softplus {
  static constexpr const char* kName = "softplus";
  static constexpr Reads kReads = Reads::input;
  static constexpr CastTo kCast = CastTo::float32;

  at::Tensor value(const at::Tensor& x) const { return at::softplus(x, beta, threshold); }
  at::Tensor grad(const at::Tensor& grad, const at::Tensor& input) const {
    return at::softplus_backward(grad, input, beta, threshold);
  }

  double beta;
  double threshold;
};

struct Elu {
  static constexpr const char* kName = "elu";
  static constexpr Reads kReads = Reads::input;

  at::Tensor value(const at::Tensor& x) const { return at::elu(x, alpha); }
  at::Tensor grad(const at::Tensor& grad, const at::Tensor& input) const {
    return at::elu_backward(grad, alpha, 1, 1, /*is_result=*/false, input);
  }

  double alpha;
};

/// In place torch's derivative reads the output.
struct EluInPlace {
  static constexpr const char* kName = "elu";
  static constexpr Reads kReads = Reads::output;

  at::Tensor value(const at::Tensor& x) const { return at::elu(x, alpha); }
  at::Tensor& value_(at::Tensor& x) const { return at::elu_(x, alpha); }
  at::Tensor grad(const at::Tensor& grad, const at::Tensor& output) const {
    return at::elu_backward(grad, alpha, 1, 1, /*is_result=*/true, output);
  }

  double alpha;
};

struct Sigmoid {
  static constexpr const char* kName = "sigmoid";
  static constexpr Reads kReads = Reads::output;

  static at::Tensor value(const at::Tensor& x) { return at::sigmoid(x); }
  static at::Tensor grad(const at::Tensor& grad, const at::Tensor& output) {
    return at::sigmoid_backward(grad, output);
  }
};

struct Tanh {
  static constexpr const char* kName = "tanh";
  static constexpr Reads kReads = Reads::output;

  static at::Tensor value(const at::Tensor& x) { return at::tanh(x); }
  static at::Tensor grad(const at::Tensor& grad, const at::Tensor& output) {
    return at::tanh_backward(grad, output);
  }
};

const Activation<Gelu, std::string_view> kGelu(", str approximate");
const ActivationWithInPlace<Silu, Silu> kSilu;
const ActivationWithInPlace<Hardswish, Hardswish> kHardswish;
const ActivationWithInPlace<Mish, Mish> kMish;
const Activation<Softplus, double, double> kSoftplus(", float beta, float threshold");
const ActivationWithInPlace<Elu, EluInPlace, double> kElu(", float alpha");
const Activation<Sigmoid> kSigmoid;
const Activation<Tanh> kTanh;

}  // namespace

at::Tensor functional::gelu(const at::Tensor& input, std::string_view approximate, bool recompute) {
  return kGelu(input, approximate, recompute);
}

at::Tensor functional::silu(const at::Tensor& input, bool inplace, bool recompute) {
  return kSilu(input, inplace, recompute);
}

at::Tensor functional::hardswish(const at::Tensor& input, bool inplace, bool recompute) {
  return kHardswish(input, inplace, recompute);
}

at::Tensor functional::mish(const at::Tensor& input, bool inplace, bool recompute) {
  return kMish(input, inplace, recompute);
}

at::Tensor functional::softplus(const at::Tensor& input, double beta, double threshold,
                                bool recompute) {
  return kSoftplus(input, beta, threshold, recompute);
}

at::Tensor functional::elu(const at::Tensor& input, double alpha, bool inplace, bool recompute) {
  return kElu(input, alpha, inplace, recompute);
}

at::Tensor functional::sigmoid(const at::Tensor& input, bool recompute) {
  return kSigmoid(input, recompute);
}

at::Tensor functional::tanh(const at::Tensor& input, bool recompute) {
  return kTanh(input, recompute);
}

}  // namespace brim::nn
