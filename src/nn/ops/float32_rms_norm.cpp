#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <brim/nn/functional.h>

#include "nn/autograd/operator.h"
#include "nn/autograd/storage_pinning.h"
#include "nn/ops/bits.h"
#include "nn/ops/norm_node.h"

// The RMS norm that the frameworks write by hand (LlamaRMSNorm and its like): it calculates in
// float32 whatever the input's type is. Their operators in their order give their bits.

namespace brim::nn {
namespace {

/// What the normalised rows are multiplied by; undefined for nothing.
at::Tensor factors_of(const MaybeTensor& weight, double offset, bool cast_first) {
  if (!is_given(weight)) {
    return {};
  }
  const at::Tensor factors = cast_first ? *weight : weight->to(at::kFloat);
  return offset == 0 ? factors : factors.add(offset);
}

// -- Forward: the output, and one number per row --------------------------------------------------

/// Any device; differentiable.
TwoTensors forward_anywhere(const at::Tensor& input, const MaybeTensor& weight, double eps,
                            double offset, bool cast_first) {
  const at::Tensor wide = input.to(at::kFloat);
  at::Tensor rstd = rms_rstd(wide, {-1}, eps);
  const at::Tensor normal = wide.mul(rstd);
  const at::Tensor factors = factors_of(weight, offset, cast_first);
  if (cast_first || !factors.defined()) {
    const at::Tensor rounded = normal.to(input.scalar_type());
    return {factors.defined() ? factors.mul(rounded) : rounded, std::move(rstd)};
  }
  return {normal.mul(factors).to(input.scalar_type()), std::move(rstd)};
}

TwoTensors forward_meta(const at::Tensor& input, const MaybeTensor& weight, double /*eps*/,
                        double /*offset*/, bool cast_first) {
  const at::ScalarType type = input.scalar_type();
  const bool promotes = cast_first && is_given(weight);
  c10::SymDimVector per_row(input.sym_sizes());
  per_row.back() = 1;
  return {at::empty_like(input,
                         input.options().dtype(
                             promotes ? at::promoteTypes(type, weight->scalar_type()) : type),
                         at::MemoryFormat::Contiguous),
          at::empty_symint(per_row, input.options().dtype(at::kFloat))};
}

const Operator<forward_anywhere> kForward(
    "float32_rms_norm_forward(Tensor input, Tensor? weight, float eps, float offset, bool "
    "cast_first) -> (Tensor, Tensor)",
    {.meta = forward_meta});

// -- Backward: gradients of input and weight, undefined if not asked for --------------------------

/// Any device; differentiable by all but `rstd`.
TwoTensors backward_anywhere(const at::Tensor& grad, const at::Tensor& input,
                             const at::Tensor& rstd, const MaybeTensor& weight, double offset,
                             bool cast_first, bool input_grad, bool weight_grad) {
  const at::ScalarType type = input.scalar_type();
  const at::Tensor wide = input.to(at::kFloat);
  const at::Tensor factors = factors_of(weight, offset, cast_first);
  const bool rounds_first = cast_first || !factors.defined();
  const at::Tensor up = rounds_first ? grad : grad.to(at::kFloat);
  TwoTensors result;
  if (weight_grad) {
    const at::Tensor normal = wide.mul(rstd);
    std::get<1>(result) = up.mul(rounds_first ? normal.to(type) : normal)
                              .sum_to_size_symint(weight->sym_sizes())
                              .to(weight->scalar_type());
  }
  if (input_grad) {
    const at::Tensor scaled = factors.defined() ? up.mul(factors) : up;
    const at::Tensor of_normal = (rounds_first ? scaled.to(type) : scaled).to(at::kFloat);
    const at::Tensor of_variance =
        of_normal.mul(wide).sum(-1, true).mul(-0.5).mul(rstd.pow(3)).div(input.sym_size(-1));
    std::get<0>(result) = of_normal.mul(rstd).add(of_variance.mul(2).mul(wide)).to(type);
  }
  return result;
}

TwoTensors backward_meta(const at::Tensor& /*grad*/, const at::Tensor& input,
                         const at::Tensor& /*rstd*/, const MaybeTensor& weight, double /*offset*/,
                         bool /*cast_first*/, bool input_grad, bool weight_grad) {
  return grads_like(input, weight, input_grad, weight_grad);
}

const Operator<backward_anywhere> kBackward(
    "float32_rms_norm_backward(Tensor grad, Tensor input, Tensor rstd, Tensor? weight, float "
    "offset, bool cast_first, bool input_grad, bool weight_grad) -> (Tensor, Tensor)",
    {.meta = backward_meta}, {at::Tag::needs_fixed_stride_order});

// -- The layer ------------------------------------------------------------------------------------

struct Float32RmsNorm {
  static constexpr const char* kName = "brim::float32_rms_norm_backward";
  static constexpr bool kReadsBias = false;

  double eps;
  double offset;
  bool cast_first;

  Normalised run(const at::Tensor& input, const MaybeTensor& weight,
                 const MaybeTensor& /*bias*/) const {
    auto [output, rstd] = kForward(input, weight, eps, offset, cast_first);
    if (!input.is_cpu()) {  // the kernels give rows one after the other
      output = as_elementwise(output, input.sym_strides(), input.sym_strides());
    }
    return {std::move(output), {}, std::move(rstd)};
  }

  /// For the weight's gradient alone torch keeps as many numbers as the input has, and none more.
  static bool keeps_statistics(const at::Tensor& input, const MaybeTensor& /*weight*/,
                               bool /*as_float32*/) {
    return input.requires_grad();
  }

  NormGrads backward(const at::Tensor& grad, const at::Tensor& input, const MaybeTensor& weight,
                     const MaybeTensor& /*bias*/, const Normalised& statistics,
                     const std::array<bool, 3>& mask) const {
    // In double backward the number of a row is a function of the input too.
    const bool differentiable = at::GradMode::is_enabled();
    const at::Tensor rstd = statistics.rstd.defined() && !differentiable
                                ? statistics.rstd
                                : rms_rstd(input.to(at::kFloat), {-1}, eps);
    auto [input_grad, weight_grad] =
        differentiable
            ? backward_anywhere(grad, input, rstd, weight, offset, cast_first, mask[0], mask[1])
            : kBackward(grad, input, rstd, weight, offset, cast_first, mask[0], mask[1]);
    if (mask[0] && !input.is_cpu()) {
      input_grad = as_elementwise(input_grad, grad.sym_strides(), input.sym_strides());
    }
    return {input_grad, weight_grad, {}};
  }

  static at::Tensor bias_grad(const at::Tensor& /*grad*/, at::ScalarType /*type*/) { return {}; }
};

void check(const at::Tensor& input, const MaybeTensor& weight, double eps) {
  TORCH_CHECK_VALUE(input.dim() > 0, "input must have at least one dimension, got a scalar");
  TORCH_CHECK_VALUE(
      !is_given(weight) || (weight->dim() == 1 && weight->sym_size(0) == input.sym_size(-1)),
      "weight must have one number for each of the input's last dimension, which has "
      "size ",
      input.sym_size(-1), ", got shape ", weight->sym_sizes());
  TORCH_CHECK_VALUE(eps >= 0, "eps must be 0 or more, got ", eps);
}

at::Tensor torch_float32_rms_norm(const at::Tensor& input, const MaybeTensor& weight, double eps,
                                  double offset, bool cast_first) {
  return std::get<0>(forward_anywhere(input, weight, eps, offset, cast_first));
}

/// Left to torch: of float64 it keeps float32, which is smaller.
bool has_float64(const at::Tensor& input, const MaybeTensor& weight) {
  return input.scalar_type() == at::kDouble ||
         (is_given(weight) && weight->scalar_type() == at::kDouble);
}

at::Tensor float32_rms_norm_autograd(const at::Tensor& input, const MaybeTensor& weight, double eps,
                                     double offset, bool cast_first) {
  check(input, weight, eps);
  if (has_float64(input, weight)) {
    return torch_float32_rms_norm(input, weight, eps, offset, cast_first);
  }
  // Of a part of a larger tensor torch keeps a copy too: in float32, or its own product.
  const bool copies = pins_more_than_itself(input) &&
                      (input.requires_grad() ? input.scalar_type() != at::kFloat : trains(weight));
  return run_with_node(Float32RmsNorm{eps, offset, cast_first},
                       copies ? input.clone(at::MemoryFormat::Preserve) : input,
                       is_given(weight) ? weight : MaybeTensor(), {});
}

const LayerOperator<float32_rms_norm_autograd, torch_float32_rms_norm, CastTo::nothing,
                    float32_rms_norm_autograd>
    kFloat32RmsNorm(
        "float32_rms_norm(Tensor input, Tensor? weight, float eps, float offset, bool cast_first) "
        "-> Tensor");

}  // namespace

at::Tensor functional::float32_rms_norm(const at::Tensor& input, const MaybeTensor& weight,
                                        double eps, double offset, bool cast_first) {
  return kFloat32RmsNorm(input, weight, eps, offset, cast_first);
}

}  // namespace brim::nn
