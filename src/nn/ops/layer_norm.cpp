#include <ATen/ops/layer_norm.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <brim/nn/functional.h>

#include "nn/autograd/operator.h"
#include "nn/ops/norm_node.h"

namespace brim::nn {
namespace {

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

  static bool keeps_statistics(const at::Tensor& /*input*/, const MaybeTensor& /*weight*/) {
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

const LayerOperator<layer_norm_autograd, torch_layer_norm, CastTo::float32_inside> kLayerNorm(
    "layer_norm(Tensor input, int[] normalized_shape, Tensor? weight, Tensor? bias, float eps, "
    "bool as_float32) -> Tensor");

}  // namespace

at::Tensor functional::layer_norm(const at::Tensor& input, at::IntArrayRef normalized_shape,
                                  const MaybeTensor& weight, const MaybeTensor& bias, double eps) {
  return kLayerNorm(input, normalized_shape, weight, bias, eps, false);
}

}  // namespace brim::nn
