#include <ATen/ops/layer_norm.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <brim/nn/functional.h>

#include "nn/autograd/operator.h"
#include "nn/ops/norm_node.h"

namespace brim::nn {
namespace {

// -- The output in another type, from the statistics ----------------------------------------------

at::Tensor as_type_anywhere(const at::Tensor& input, at::IntArrayRef shape,
                            const at::Tensor& /*mean*/, const at::Tensor& /*rstd*/,
                            const MaybeTensor& weight, const MaybeTensor& bias, double eps,
                            at::ScalarType type) {
  return std::get<0>(at::native_layer_norm(input.to(at::kFloat), shape, weight, bias, eps))
      .to(type);
}

const Operator<as_type_anywhere> kAsType(
    "layer_norm_as_type(Tensor input, int[] normalized_shape, Tensor mean, Tensor rstd, Tensor? "
    "weight, Tensor? bias, float eps, ScalarType dtype) -> Tensor");

// -- The layer ------------------------------------------------------------------------------------

struct LayerNorm {
  static constexpr const char* kName = "brim::layer_norm_backward";
  static constexpr bool kReadsBias = true;

  c10::DimVector shape;
  double eps;

  Normalised run(const at::Tensor& input, const MaybeTensor& weight,
                 const MaybeTensor& bias) const {
    auto [output, mean, rstd] = at::native_layer_norm(input, shape, weight, bias, eps);
    return {std::move(output), std::move(mean), std::move(rstd)};
  }

  /// What autocast casts for the next layer. Torch's kernels keep the statistics in float32.
  at::Tensor run_as(at::ScalarType type, at::ScalarType given, const at::Tensor& input,
                    const MaybeTensor& weight, const MaybeTensor& bias,
                    const Normalised& statistics) const {
    const bool is_known =
        runs_again_as(type, input, weight, bias) && type != at::kFloat && given == at::kFloat;
    return is_known
               ? kAsType(input, shape, statistics.mean, statistics.rstd, weight, bias, eps, type)
               : at::Tensor();
  }

  static bool keeps_statistics(const at::Tensor& /*input*/, const MaybeTensor& /*weight*/,
                               bool /*as_float32*/) {
    return true;
  }

  NormGrads backward(const at::Tensor& grad, const at::Tensor& input, const MaybeTensor& weight,
                     const MaybeTensor& bias, const Normalised& statistics,
                     const std::array<bool, 3>& mask) const {
    return at::native_layer_norm_backward(grad, input, shape, statistics.mean, statistics.rstd,
                                          weight, bias, mask);
  }

  at::Tensor bias_grad(const at::Tensor& grad, at::ScalarType type) const {
    return sum_over_rows(grad, static_cast<std::int64_t>(shape.size()), type);
  }
};

at::Tensor torch_layer_norm(const at::Tensor& input, at::IntArrayRef shape,
                            const MaybeTensor& weight, const MaybeTensor& bias, double eps,
                            bool as_float32) {
  return at::layer_norm(widened(input, as_float32), shape, weight, bias, eps);
}

at::Tensor layer_norm_autograd(const at::Tensor& input, at::IntArrayRef shape,
                               const MaybeTensor& weight, const MaybeTensor& bias, double eps,
                               bool as_float32) {
  return run_with_node(LayerNorm{c10::DimVector(shape), eps}, input, weight, bias, as_float32);
}

const LayerOperator<layer_norm_autograd, torch_layer_norm, CastTo::float32_inside,
                    layer_norm_autograd>
    kLayerNorm(
        "layer_norm(Tensor input, int[] normalized_shape, Tensor? weight, Tensor? bias, float eps, "
        "bool as_float32) -> Tensor");

}  // namespace

at::Tensor functional::layer_norm(const at::Tensor& input, at::IntArrayRef normalized_shape,
                                  const MaybeTensor& weight, const MaybeTensor& bias, double eps) {
  return kLayerNorm(input, normalized_shape, weight, bias, eps, false);
}

}  // namespace brim::nn
