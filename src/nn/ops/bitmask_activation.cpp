#include <ATen/ops/empty_like.h>
#include <ATen/ops/hardsigmoid.h>
#include <ATen/ops/hardsigmoid_backward.h>
#include <ATen/ops/hardtanh.h>
#include <ATen/ops/hardtanh_backward.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/leaky_relu_backward.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/threshold.h>
#include <ATen/ops/threshold_backward.h>
#include <brim/nn/functional.h>

#include "nn/cpu/bits.h"
#include "nn/cpu/number.h"
#include "nn/ops/activation.h"

// Activations whose derivative has two values: one bit per element says which.

namespace brim::nn {
namespace {

struct Relu {
  static constexpr const char* kName = "relu";
  static constexpr Reads kReads = Reads::output;
  static constexpr bool kGradFirst = false;

  static at::Tensor value(const at::Tensor& x) { return at::relu(x); }
  static at::Tensor& value_(at::Tensor& x) { return at::relu_(x); }
  static at::Tensor grad(const at::Tensor& grad, const at::Tensor& output) {
    return at::threshold_backward(grad, output, 0);
  }
  static at::Tensor recompute(const Edge& origin, c10::SymIntArrayRef strides) {
    return nn::recompute_relu(origin, strides);
  }

  static BitRule bits() { return {}; }
  static at::Tensor passes(const at::Tensor& x) {
    return x.le(0).logical_not_();  // NaN passes, as in torch
  }
  static bool output_tells(at::ScalarType /*type*/) { return true; }
};

/// Whether a number of this type is the bound that the derivative is compared with.
bool holds(at::ScalarType type, double bound) {
  const auto wide = static_cast<float>(bound);
  return type == at::kHalf       ? static_cast<float>(to<at::Half>(bound)) == wide
         : type == at::kBFloat16 ? static_cast<float>(to<at::BFloat16>(bound)) == wide
                                 : true;
}

struct Hardtanh {
  static constexpr const char* kName = "hardtanh";
  static constexpr Reads kReads = Reads::input;
  static constexpr bool kGradFirst = true;

  Hardtanh(double min_val, double max_val) : lower(min_val), upper(max_val) {
    TORCH_CHECK_VALUE(lower <= upper, "min_val must not be above max_val, got ", lower, " and ",
                      upper);
  }

  at::Tensor value(const at::Tensor& x) const { return at::hardtanh(x, lower, upper); }
  at::Tensor& value_(at::Tensor& x) const { return at::hardtanh_(x, lower, upper); }
  at::Tensor grad(const at::Tensor& grad, const at::Tensor& output) const {
    return at::hardtanh_backward(grad, output, lower, upper);
  }

  BitRule bits() const { return {.a = lower, .b = upper}; }
  at::Tensor passes(const at::Tensor& x) const {
    // Not comparisons: they would round the bounds to the input's type first.
    return at::hardtanh_backward(at::ones_like(x), x, lower, upper);
  }
  /// Not where a bound is rounded in the output: it may lie on the inner side.
  bool output_tells(at::ScalarType type) const { return holds(type, lower) && holds(type, upper); }

  double lower;
  double upper;
};

struct LeakyRelu {
  static constexpr const char* kName = "leaky_relu";
  static constexpr Reads kReads = Reads::input;
  static constexpr bool kGradFirst = false;

  at::Tensor value(const at::Tensor& x) const { return at::leaky_relu(x, slope); }
  at::Tensor& value_(at::Tensor& x) const { return at::leaky_relu_(x, slope); }
  at::Tensor grad(const at::Tensor& grad, const at::Tensor& output) const {
    return at::leaky_relu_backward(grad, output, slope, /*self_is_result=*/true);
  }

  BitRule bits() const { return {.a = slope, .off = slope}; }
  static at::Tensor passes(const at::Tensor& x) { return x.gt(0); }
  /// A slope below 0 changes the sign.
  bool output_tells(at::ScalarType /*type*/) const { return slope >= 0; }

  double slope;
};

struct Hardsigmoid {
  static constexpr const char* kName = "hardsigmoid";
  static constexpr Reads kReads = Reads::input;
  static constexpr bool kGradFirst = true;

  static at::Tensor value(const at::Tensor& x) { return at::hardsigmoid(x); }
  static at::Tensor& value_(at::Tensor& x) { return at::hardsigmoid_(x); }
  static at::Tensor grad(const at::Tensor& grad, const at::Tensor& input) {
    if (!at::GradMode::is_enabled()) {
      return at::hardsigmoid_backward(grad, input);
    }
    // torch's kernel has no derivative.
    return grad.mul(bits().on).masked_fill(passes(input).logical_not(), 0);
  }

  static BitRule bits() { return {.on = 1.0F / 6.0F}; }  // float32 in torch's kernels, too
  static at::Tensor passes(const at::Tensor& x) { return x.abs().lt_(3); }
};

struct Threshold {
  static constexpr const char* kName = "threshold";
  static constexpr Reads kReads = Reads::input;
  static constexpr bool kGradFirst = false;

  at::Tensor value(const at::Tensor& x) const { return at::threshold(x, threshold, other); }
  at::Tensor& value_(at::Tensor& x) const { return at::threshold_(x, threshold, other); }
  at::Tensor grad(const at::Tensor& grad, const at::Tensor& output) const {
    return at::threshold_backward(grad, output, threshold);
  }

  BitRule bits() const { return {.a = threshold, .b = other}; }
  at::Tensor passes(const at::Tensor& x) const { return grad(at::ones_like(x), x); }
  /// Not where what takes the input's place is above the threshold itself.
  bool output_tells(at::ScalarType type) const {
    return other <= threshold && holds(type, other) && holds(type, threshold);
  }

  double threshold;
  double other;
};

// -- The kernels ------------------------------------------------------------------------------

/// Calls `run` with the activation of this name.
template <class Run>
auto with_activation(std::string_view name, double a, double b, const Run& run) {
  if (name == Relu::kName) {
    return run(Relu{});
  }
  if (name == Hardtanh::kName) {
    return run(Hardtanh{a, b});
  }
  if (name == LeakyRelu::kName) {
    return run(LeakyRelu{a});
  }
  if (name == Hardsigmoid::kName) {
    return run(Hardsigmoid{});
  }
  TORCH_CHECK_VALUE(name == Threshold::kName, "unknown bitmask activation: ", name);
  return run(Threshold{a, b});
}

std::tuple<at::Tensor, at::Tensor> pack_anywhere(const at::Tensor& input, std::string_view name,
                                                 double a, double b) {
  const at::Tensor source = dense(input);
  return with_activation(name, a, b, [&](const auto& activation) {
    return std::tuple(activation.value(source), pack_bits(activation.passes(source)));
  });
}

at::Tensor pack_anywhere_(at::Tensor& input, std::string_view name, double a, double b) {
  return with_activation(name, a, b, [&](const auto& activation) {
    at::Tensor bits = pack_bits(activation.passes(input));
    activation.value_(input);
    return bits;
  });
}

at::Tensor pack_meta_(at::Tensor& input, std::string_view, double, double) {
  return empty_bits(input);
}

std::tuple<at::Tensor, at::Tensor> pack_meta(const at::Tensor& input, std::string_view, double,
                                             double) {
  const at::Tensor output = at::empty_like(dense(input));
  return {output, empty_bits(output)};
}

const std::vector<at::Tag> kTags{at::Tag::needs_fixed_stride_order};
const Operator<pack_anywhere> kPack(
    "bitmask_pack(Tensor input, str activation, float a, float b) -> (Tensor, Tensor)",
    {.cpu = bitmask_pack_with<cpu::bitmask_pack>, .meta = pack_meta}, kTags);
const Operator<pack_anywhere_> kPackInPlace(
    "bitmask_pack_(Tensor(a!) input, str activation, float a, float b) -> Tensor",
    {.cpu = bitmask_pack_with_<cpu::bitmask_pack>, .meta = pack_meta_}, kTags);

// -- The layers -------------------------------------------------------------------------------

const ActivationWithInPlace<Relu, Relu> kRelu;
const ActivationWithInPlace<Hardtanh, Hardtanh, double, double> kHardtanh(
    ", float min_val, float max_val");
const ActivationWithInPlace<LeakyRelu, LeakyRelu, double> kLeakyRelu(", float negative_slope");
const ActivationWithInPlace<Hardsigmoid, Hardsigmoid> kHardsigmoid;
const ActivationWithInPlace<Threshold, Threshold, double, double> kThreshold(
    ", float threshold, float value");

}  // namespace

std::tuple<at::Tensor, at::Tensor> bitmask_pack(const at::Tensor& input, std::string_view name,
                                                double a, double b) {
  return kPack(input, name, a, b);
}

at::Tensor bitmask_pack_(at::Tensor& input, std::string_view name, double a, double b) {
  return kPackInPlace(input, name, a, b);
}

at::Tensor functional::relu(const at::Tensor& input, bool inplace, Again recompute) {
  return kRelu(input, inplace, recompute);
}

at::Tensor functional::relu6(const at::Tensor& input, bool inplace, Again recompute) {
  return kHardtanh(input, 0, 6, inplace, recompute);
}

at::Tensor functional::hardtanh(const at::Tensor& input, double min_val, double max_val,
                                bool inplace, Again recompute) {
  return kHardtanh(input, min_val, max_val, inplace, recompute);
}

at::Tensor functional::leaky_relu(const at::Tensor& input, double negative_slope, bool inplace,
                                  Again recompute) {
  return kLeakyRelu(input, negative_slope, inplace, recompute);
}

at::Tensor functional::hardsigmoid(const at::Tensor& input, bool inplace, Again recompute) {
  return kHardsigmoid(input, inplace, recompute);
}

at::Tensor functional::threshold(const at::Tensor& input, double threshold, double value,
                                 bool inplace, Again recompute) {
  return kThreshold(input, threshold, value, inplace, recompute);
}

}  // namespace brim::nn
