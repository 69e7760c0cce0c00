#include <ATen/ops/_fused_rms_norm.h>
#include <ATen/ops/_fused_rms_norm_backward.h>
#include <ATen/ops/rms_norm.h>
#include <brim/nn/functional.h>

#include <limits>

#include "nn/autograd/operator.h"
#include "nn/autograd/storage_pinning.h"
#include "nn/cpu/number.h"
#include "nn/cpu/rms_norm.h"
#include "nn/ops/bits.h"
#include "nn/ops/norm_node.h"

namespace brim::nn {
namespace {

/// `-1`, `-2`, ... for `dims` dimensions.
c10::DimVector last_dims(std::int64_t dims) {
  c10::DimVector result;
  for (std::int64_t i = 1; i <= dims; ++i) {
    result.push_back(-i);
  }
  return result;
}

bool is_channels_last(const at::Tensor& input) {
  const at::MemoryFormat format = input.suggest_memory_format();
  return format == at::MemoryFormat::ChannelsLast || format == at::MemoryFormat::ChannelsLast3d;
}

/// Whether torch's own function takes the kernel of this device for an input of this type: as it
/// decides itself.
bool has_kernel(const at::Tensor& input, at::ScalarType type, const MaybeTensor& weight) {
  return input.is_cuda() && !is_channels_last(input) &&
         (!is_given(weight) || weight->scalar_type() == type);
}

bool has_kernel(const at::Tensor& input, const MaybeTensor& weight) {
  return has_kernel(input, input.scalar_type(), weight);
}

double eps_of(const at::Tensor& input, std::optional<double> eps) {
  if (input.scalar_type() == at::kDouble) {
    return eps.value_or(std::numeric_limits<double>::epsilon());
  }
  return static_cast<float>(eps.value_or(std::numeric_limits<float>::epsilon()));
}

// -- Backward: gradients of input and weight, undefined if not asked for --------------------------

/// Any device; differentiable by all but `rstd`.
TwoTensors rms_backward_anywhere(const at::Tensor& grad, const at::Tensor& input,
                                 const at::Tensor& rstd, const MaybeTensor& weight,
                                 std::int64_t dims, bool input_grad, bool weight_grad) {
  const at::ScalarType wide = at::toOpMathType(input.scalar_type());
  const at::Tensor up = grad.to(wide);
  const at::Tensor normal = input.to(wide).mul(rstd);
  TwoTensors result;
  if (input_grad) {
    const at::Tensor scaled = is_given(weight) ? up.mul(weight->to(wide)) : up;
    std::get<0>(result) = before_norm(scaled, normal, rstd, last_dims(dims), false)
                              .to(input.scalar_type())
                              .contiguous();
  }
  if (weight_grad) {
    std::get<1>(result) =
        sum_over_rows(up.mul(normal), dims, wide).to(weight->scalar_type()).contiguous();
  }
  return result;
}

TwoTensors rms_backward_meta(const at::Tensor&, const at::Tensor& input, const at::Tensor&,
                             const MaybeTensor& weight, std::int64_t, bool input_grad,
                             bool weight_grad) {
  return grads_like(input, weight, input_grad, weight_grad);
}

const Operator<rms_backward_anywhere> kRmsBackward(
    "rms_norm_backward(Tensor grad, Tensor input, Tensor rstd, Tensor? weight, int dims, bool "
    "input_grad, bool weight_grad) -> (Tensor, Tensor)",
    {.cpu = cpu::rms_norm_backward, .meta = rms_backward_meta},
    {at::Tag::needs_fixed_stride_order});

// -- The layer --------------------------------------------------------------------------------

struct RmsNorm {
  static constexpr const char* kName = "brim::rms_norm_backward";
  static constexpr bool kReadsBias = false;

  c10::DimVector shape;
  std::optional<double> eps;

  [[nodiscard]] std::int64_t dims() const { return static_cast<std::int64_t>(shape.size()); }

  Normalised run(const at::Tensor& input, const MaybeTensor& weight,
                 const MaybeTensor& /*bias*/) const {
    auto [output, rstd] = output_and_rstd(input, weight);
    return {std::move(output), {}, std::move(rstd)};
  }

  /// For the weight's gradient alone torch keeps as many numbers as the input has, and none more.
  static bool keeps_statistics(const at::Tensor& input, const MaybeTensor& weight,
                               bool as_float32) {
    return input.requires_grad() ||
           has_kernel(input, as_float32 ? at::kFloat : input.scalar_type(), weight);
  }

  [[nodiscard]] TwoTensors output_and_rstd(const at::Tensor& input,
                                           const MaybeTensor& weight) const {
    if (has_kernel(input, weight) || input.is_cpu()) {
      // On the CPU a composition of ATen operators, the same for all mixes of types.
      return at::_fused_rms_norm(input, shape, weight, eps);
    }
    const at::Tensor wide = input.to(at::toOpMathType(input.scalar_type()));
    at::Tensor rstd = rms_rstd(wide, last_dims(dims()), eps_of(input, eps));
    at::Tensor value = wide.mul(rstd);
    if (weight) {
      value = value.mul(*weight);
    }
    if (!is_channels_last(input)) {
      value = value.contiguous();
    }
    return {value.to(input.scalar_type()), std::move(rstd)};
  }

  NormGrads backward(const at::Tensor& grad, const at::Tensor& input, const MaybeTensor& weight,
                     const MaybeTensor& /*bias*/, const Normalised& statistics,
                     const std::array<bool, 3>& mask) const {
    // In double backward the number of a row is a function of the input too.
    const bool differentiable = at::GradMode::is_enabled();
    const at::Tensor rstd = statistics.rstd.defined() && !differentiable
                                ? statistics.rstd
                                : rms_rstd(input.to(at::toOpMathType(input.scalar_type())),
                                           last_dims(dims()), eps_of(input, eps));
    TwoTensors result;
    if (differentiable) {
      result = rms_backward_anywhere(grad, input, rstd, weight, dims(), mask[0], mask[1]);
    } else if (has_kernel(input, weight)) {
      result = at::_fused_rms_norm_backward(grad, input, shape, rstd, weight, {mask[0], mask[1]});
    } else {
      result = kRmsBackward(grad, input, rstd, weight, dims(), mask[0], mask[1]);
      if (mask[0]) {
        // Of torch's products the gradient's comes first.
        at::Tensor& input_grad = std::get<0>(result);
        input_grad = as_elementwise(input_grad, grad.sym_strides(), input_grad.sym_strides());
      }
    }
    return {std::get<0>(result), std::get<1>(result), {}};
  }

  static at::Tensor bias_grad(const at::Tensor& /*grad*/, at::ScalarType /*type*/) { return {}; }
};

at::Tensor torch_rms_norm(const at::Tensor& input, at::IntArrayRef shape, const MaybeTensor& weight,
                          std::optional<double> eps, bool as_float32) {
  return at::rms_norm(widened(input, as_float32), shape, is_given(weight) ? weight : MaybeTensor(),
                      eps);
}

at::Tensor rms_norm_autograd(const at::Tensor& input, at::IntArrayRef shape,
                             const MaybeTensor& weight, std::optional<double> eps,
                             bool as_float32) {
  check_normalized_shape(input, shape, weight);
  // For the weight's gradient torch keeps a product of its own.
  const bool copies = trains(weight) && !input.requires_grad() && pins_more_than_itself(input);
  return run_with_node(RmsNorm{c10::DimVector(shape), eps},
                       copies ? input.clone(at::MemoryFormat::Contiguous) : input,
                       is_given(weight) ? weight : MaybeTensor(), {}, as_float32);
}

const LayerOperator<rms_norm_autograd, torch_rms_norm, CastTo::float32_inside> kRmsNorm(
    "rms_norm(Tensor input, int[] normalized_shape, Tensor? weight, float? eps, bool as_float32) "
    "-> Tensor");

}  // namespace

at::Tensor functional::rms_norm(const at::Tensor& input, at::IntArrayRef normalized_shape,
                                const MaybeTensor& weight, std::optional<double> eps) {
  return kRmsNorm(input, normalized_shape, weight, eps, false);
}

}  // namespace brim::nn
