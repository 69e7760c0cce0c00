#include <ATen/ops/group_norm.h>
#include <ATen/ops/native_group_norm.h>
#include <ATen/ops/native_group_norm_backward.h>
#include <brim/nn/functional.h>

#include "nn/autograd/operator.h"
#include "nn/autograd/storage_pinning.h"
#include "nn/cpu/number.h"
#include "nn/ops/norm_node.h"

namespace brim::nn {
namespace {

/// The input as samples, channels and places.
struct Sizes {
  explicit Sizes(const at::Tensor& input)
      : samples(input.sym_size(0)), channels(input.sym_size(1)) {
    for (const c10::SymInt& size : input.sym_sizes().slice(2)) {
      places = places * size;
    }
  }

  c10::SymInt samples;
  c10::SymInt channels;
  c10::SymInt places = 1;
};

/// As torch's function and its derivative bring tensors to their kernels.
at::Tensor for_kernel(const at::Tensor& tensor, at::MemoryFormat format) {
  return tensor.contiguous(tensor.is_cpu() ? format : at::MemoryFormat::Contiguous);
}

// -- The output again, from the statistics --------------------------------------------------------

at::Tensor group_norm_as_type_anywhere(const at::Tensor& input, std::int64_t groups,
                                       const at::Tensor& /*mean*/, const at::Tensor& /*rstd*/,
                                       const MaybeTensor& weight, const MaybeTensor& bias,
                                       double eps, at::ScalarType type) {
  return at::group_norm(input.to(at::kFloat), groups, weight, bias, eps).to(type);
}

const Operator<group_norm_as_type_anywhere> kGroupNormAsType(
    "group_norm_as_type(Tensor input, int num_groups, Tensor mean, Tensor rstd, Tensor? weight, "
    "Tensor? bias, float eps, ScalarType dtype) -> Tensor");

// -- The layer ------------------------------------------------------------------------------------

struct GroupNorm {
  static constexpr const char* kName = "brim::group_norm_backward";
  static constexpr bool kReadsBias = false;

  std::int64_t groups;
  double eps;

  Normalised run(const at::Tensor& input, const MaybeTensor& weight,
                 const MaybeTensor& bias) const {
    const Sizes sizes(input);
    auto [output, mean, rstd] =
        at::native_group_norm_symint(for_kernel(input, input.suggest_memory_format()), weight, bias,
                                     sizes.samples, sizes.channels, sizes.places, groups, eps);
    return {std::move(output), std::move(mean), std::move(rstd)};
  }

  /// torch's kernel in one pass on CUDA, where the statistics are in float32. Without weights, or
  /// with one value per channel, it has another formula.
  at::Tensor run_as(at::ScalarType type, at::ScalarType /*given*/, const at::Tensor& input,
                    const MaybeTensor& weight, const MaybeTensor& bias,
                    const Normalised& statistics) const {
    const bool is_known =
        runs_again_as(type, input, weight, bias) && statistics.mean.scalar_type() == at::kFloat &&
        (is_given(weight) || is_given(bias)) && input.numel() > input.size(0) * input.size(1);
    return is_known ? kGroupNormAsType(input, groups, statistics.mean, statistics.rstd, weight,
                                       bias, eps, type)
                    : at::Tensor();
  }

  static bool keeps_statistics(const at::Tensor& /*input*/, const MaybeTensor& /*weight*/,
                               bool /*as_float32*/) {
    return true;
  }

  NormGrads backward(const at::Tensor& grad, const at::Tensor& input, const MaybeTensor& weight,
                     const MaybeTensor& /*bias*/, const Normalised& statistics,
                     const std::array<bool, 3>& mask) const {
    if (at::GradMode::is_enabled()) {
      return differentiable_backward(grad, input, weight, mask);
    }
    const Sizes sizes(input);
    // torch's kernel for channels last writes to the input's gradient even if none is asked for.
    const at::MemoryFormat format =
        mask[0] ? input.suggest_memory_format() : at::MemoryFormat::Contiguous;
    return at::native_group_norm_backward_symint(
        for_kernel(grad, format), for_kernel(input, format), statistics.mean, statistics.rstd,
        weight, sizes.samples, sizes.channels, sizes.places, groups, mask);
  }

  /// torch's kernel has no derivative, so the statistics are computed again, as a function of the
  /// input.
  NormGrads differentiable_backward(const at::Tensor& grad, const at::Tensor& input,
                                    const MaybeTensor& weight,
                                    const std::array<bool, 3>& mask) const {
    const Sizes sizes(input);
    const at::ScalarType wide = at::toOpMathType(input.scalar_type());
    const c10::SymInt in_group = sizes.channels / groups * sizes.places;
    const c10::SymDimVector by_group{sizes.samples, groups, in_group};
    const c10::SymDimVector by_channel{sizes.samples, sizes.channels, sizes.places};
    const at::Tensor grouped = input.to(wide).reshape_symint(by_group);
    const at::Tensor centred = grouped.sub(grouped.mean(-1, true));
    const at::Tensor rstd = centred.square().mean(-1, true).add(eps).rsqrt();
    const at::Tensor normal = centred.mul(rstd);
    const at::Tensor up = grad.to(wide).reshape_symint(by_channel);
    NormGrads result;
    if (mask[0]) {
      const at::Tensor scaled =
          weight ? up.mul(weight->to(wide).view_symint({1, sizes.channels, 1})) : up;
      std::get<0>(result) = before_norm(scaled.reshape_symint(by_group), normal, rstd, {-1}, true)
                                .reshape_symint(input.sym_sizes())
                                .to(input.scalar_type());
    }
    if (mask[1]) {
      std::get<1>(result) = up.mul(normal.reshape_symint(by_channel))
                                .sum(at::IntArrayRef({0, 2}))
                                .to(weight->scalar_type());
    }
    return result;
  }

  static at::Tensor bias_grad(const at::Tensor& grad, at::ScalarType type) {
    return sum_over_channels(grad, type);
  }
};

void check(const at::Tensor& input, std::int64_t groups, const MaybeTensor& weight,
           const MaybeTensor& bias) {
  TORCH_CHECK(input.dim() >= 2, "Expected at least 2 dimensions for input tensor but received ",
              input.dim());
  TORCH_CHECK_VALUE(groups > 0, "num_groups must be 1 or more, got ", groups);
  // torch's Python function says this of its groups, its operator does not.
  const Sizes sizes(input);
  TORCH_CHECK_VALUE(sizes.samples * sizes.channels / groups * sizes.places != 1,
                    "Expected more than 1 value per channel when training, got input size ",
                    input.sym_sizes());
  TORCH_CHECK(sizes.channels % groups == 0,
              "Expected number of channels in input to be divisible by num_groups, but got input "
              "of shape ",
              input.sym_sizes(), " and num_groups=", groups);
  for (const MaybeTensor* const each : {&weight, &bias}) {
    TORCH_CHECK(!is_given(*each) || ((*each)->dim() == 1 && (*each)->sym_size(0) == sizes.channels),
                "Expected ", each == &weight ? "weight" : "bias",
                " to be a vector of size equal to the number of channels in input, but got shape ",
                (*each)->sym_sizes(), " and input of shape ", input.sym_sizes());
  }
}

at::Tensor torch_group_norm(const at::Tensor& input, std::int64_t groups, const MaybeTensor& weight,
                            const MaybeTensor& bias, double eps, bool as_float32) {
  return at::group_norm(widened(input, as_float32), groups, weight, bias, eps);
}

at::Tensor group_norm_autograd(const at::Tensor& input, std::int64_t groups,
                               const MaybeTensor& weight, const MaybeTensor& bias, double eps,
                               bool as_float32) {
  check(input, groups, weight, bias);
  // Of a part of a larger tensor torch makes a copy too, and keeps it.
  const bool copies = (input.requires_grad() || trains(weight)) && pins_more_than_itself(input);
  return run_with_node(GroupNorm{groups, eps},
                       copies ? for_kernel(input, input.suggest_memory_format()) : input, weight,
                       bias, as_float32);
}

const LayerOperator<group_norm_autograd, torch_group_norm, CastTo::float32_inside,
                    group_norm_autograd>
    kGroupNorm(
        "group_norm(Tensor input, int num_groups, Tensor? weight, Tensor? bias, float eps, bool "
        "as_float32) -> Tensor");

}  // namespace

at::Tensor functional::group_norm(const at::Tensor& input, std::int64_t num_groups,
                                  const MaybeTensor& weight, const MaybeTensor& bias, double eps) {
  return kGroupNorm(input, num_groups, weight, bias, eps, false);
}

}  // namespace brim::nn
