#include "nn/ops/activation.h"

#include <ATen/ScalarOps.h>
#include <ATen/ops/celu.h>
#include <ATen/ops/elu.h>
#include <ATen/ops/elu_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/hardswish.h>
#include <ATen/ops/hardswish_backward.h>
#include <ATen/ops/log_sigmoid.h>
#include <ATen/ops/log_sigmoid_backward.h>
#include <ATen/ops/log_sigmoid_forward.h>
#include <ATen/ops/mish.h>
#include <ATen/ops/mish_backward.h>
#include <ATen/ops/selu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sigmoid_backward.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/softplus_backward.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/tanh_backward.h>
#include <brim/nn/functional.h>

#include <array>

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

/// ELU and its relatives. In place torch's derivative reads the output.
/// @tparam Of has kName, value, value_, and the factors of the derivative: alpha, that of the
///         result, and that of the input
template <class Of, bool InPlace>
struct EluLike : Of {
  static constexpr Reads kReads = InPlace ? Reads::output : Reads::input;

  at::Tensor grad(const at::Tensor& grad, const at::Tensor& read) const {
    const auto [negative, scale, inner] = this->factors();
    return at::elu_backward(grad, negative, scale, inner, InPlace, read);
  }
};

struct Elu {
  static constexpr const char* kName = "elu";

  at::Tensor value(const at::Tensor& x) const { return at::elu(x, alpha); }
  at::Tensor& value_(at::Tensor& x) const { return at::elu_(x, alpha); }
  std::array<double, 3> factors() const { return {alpha, 1, 1}; }

  double alpha;
};

struct Celu {
  static constexpr const char* kName = "celu";

  at::Tensor value(const at::Tensor& x) const { return at::celu(x, alpha); }
  at::Tensor& value_(at::Tensor& x) const { return at::celu_(x, alpha); }
  std::array<double, 3> factors() const {
    return {alpha, 1, 1.0 / static_cast<float>(alpha)};  // float in torch's derivative, too
  }

  double alpha;
};

struct Selu {
  static constexpr const char* kName = "selu";

  static at::Tensor value(const at::Tensor& x) { return at::selu(x); }
  static at::Tensor& value_(at::Tensor& x) { return at::selu_(x); }
  static std::array<double, 3> factors() {
    return {1.6732632423543772848170429916717, 1.0507009873554804934193349852946, 1};
  }
};

/// torch keeps the exponential function beside the input.
struct LogSigmoid {
  static constexpr const char* kName = "logsigmoid";
  static constexpr Reads kReads = Reads::input;

  static at::Tensor value(const at::Tensor& x) { return at::log_sigmoid(x); }
  static at::Tensor grad(const at::Tensor& grad, const at::Tensor& input) {
    at::Tensor exponential;
    if (input.is_cuda()) {
      exponential = at::empty({0}, input.options());  // torch's kernel computes it itself
    } else {
      const at::NoGradGuard no_graph;
      exponential = std::get<1>(at::log_sigmoid_forward(input));
    }
    return at::log_sigmoid_backward(grad, input, exponential);
  }
};

/// Operator by operator as torch.nn.functional and autograd, which keeps the divisor too.
struct Softsign {
  static constexpr const char* kName = "softsign";
  static constexpr Reads kReads = Reads::input;

  static at::Tensor value(const at::Tensor& x) {
    // A number as Python gives it: nested tensors have no other sum.
    return x.div(x.abs().add(at::native::wrapped_scalar_tensor(1)));
  }
  static at::Tensor grad(const at::Tensor& grad, const at::Tensor& input) {
    const at::Tensor divisor = input.abs().add(1);
    const at::Tensor of_divisor = grad.neg().mul(input.div(divisor).div(divisor));
    return grad.div(divisor).add(of_divisor.mul(input.sgn()));
  }
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
const ActivationWithInPlace<EluLike<Elu, false>, EluLike<Elu, true>, double> kElu(", float alpha");
const ActivationWithInPlace<EluLike<Celu, false>, EluLike<Celu, true>, double> kCelu(
    ", float alpha");
const ActivationWithInPlace<EluLike<Selu, false>, EluLike<Selu, true>> kSelu;
const Activation<LogSigmoid> kLogSigmoid;
const Activation<Softsign> kSoftsign;
const Activation<Sigmoid> kSigmoid;
const Activation<Tanh> kTanh;

}  // namespace

at::Tensor functional::gelu(const at::Tensor& input, std::string_view approximate,
                            Again recompute) {
  return kGelu(input, approximate, recompute);
}

at::Tensor functional::silu(const at::Tensor& input, bool inplace, Again recompute) {
  return kSilu(input, inplace, recompute);
}

at::Tensor functional::hardswish(const at::Tensor& input, bool inplace, Again recompute) {
  return kHardswish(input, inplace, recompute);
}

at::Tensor functional::mish(const at::Tensor& input, bool inplace, Again recompute) {
  return kMish(input, inplace, recompute);
}

at::Tensor functional::softplus(const at::Tensor& input, double beta, double threshold,
                                Again recompute) {
  return kSoftplus(input, beta, threshold, recompute);
}

at::Tensor functional::elu(const at::Tensor& input, double alpha, bool inplace, Again recompute) {
  return kElu(input, alpha, inplace, recompute);
}

at::Tensor functional::celu(const at::Tensor& input, double alpha, bool inplace, Again recompute) {
  return kCelu(input, alpha, inplace, recompute);
}

at::Tensor functional::selu(const at::Tensor& input, bool inplace, Again recompute) {
  return kSelu(input, inplace, recompute);
}

at::Tensor functional::logsigmoid(const at::Tensor& input, Again recompute) {
  return kLogSigmoid(input, recompute);
}

at::Tensor functional::softsign(const at::Tensor& input, Again recompute) {
  return kSoftsign(input, recompute);
}

at::Tensor functional::sigmoid(const at::Tensor& input, Again recompute) {
  return kSigmoid(input, recompute);
}

at::Tensor functional::tanh(const at::Tensor& input, Again recompute) {
  return kTanh(input, recompute);
}

}  // namespace brim::nn
