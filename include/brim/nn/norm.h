#pragma once

#include <brim/nn/layer.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/normalization.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace brim::nn {

// Torch's forward is not virtual: layer.h says what follows from that.
// NOLINTBEGIN(bugprone-derived-method-shadowing-base-method)

/// In evaluation a BatchNorm keeps its input only where its weight needs a gradient; in training,
/// always.
BRIM_LAYER(BatchNorm1d, Layer, const at::Tensor&);
/// torch::nn::BatchNorm2d that see BatchNorm1d.
BRIM_LAYER(BatchNorm2d, Layer, const at::Tensor&);
/// torch::nn::BatchNorm3d that see BatchNorm1d.
BRIM_LAYER(BatchNorm3d, Layer, const at::Tensor&);
/// torch::nn::LayerNorm that keeps its input.
BRIM_LAYER(LayerNorm, Layer, const at::Tensor&);
/// torch::nn::GroupNorm that keeps its input.
BRIM_LAYER(GroupNorm, Layer, const at::Tensor&);

/// Options of RMSNorm, which torch::nn has in Python only.
///
///     brim::nn::RMSNorm norm(brim::nn::RMSNormOptions({64}).eps(1e-6));
struct BRIM_API RMSNormOptions {
  /// @param shape the sizes of the last dimensions, over which the mean square is taken
  /* implicit */ RMSNormOptions(std::vector<std::int64_t> shape)
      : normalized_shape_(std::move(shape)) {}

  TORCH_ARG(std::vector<std::int64_t>, normalized_shape);
  /// Nothing: the smallest step of the input's type above 1.
  TORCH_ARG(std::optional<double>, eps) = std::nullopt;
  /// Whether there is a weight to learn.
  TORCH_ARG(bool, elementwise_affine) = true;
};

/// Parameter: `weight`, as in Python's torch.nn.RMSNorm.
class BRIM_API RMSNormImpl : public torch::nn::Cloneable<RMSNormImpl> {
 public:
  /// @throws c10::ValueError unless `normalized_shape` has at least one size, and all above 0.
  explicit RMSNormImpl(RMSNormOptions given);

  at::Tensor forward(const at::Tensor& input);

  void reset() override;
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  RMSNormOptions options;
  /// Undefined without `elementwise_affine`.
  at::Tensor weight;
};
TORCH_MODULE(RMSNorm);

// NOLINTEND(bugprone-derived-method-shadowing-base-method)

}  // namespace brim::nn
