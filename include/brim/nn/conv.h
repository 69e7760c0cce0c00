#pragma once

#include <brim/nn/layer.h>
#include <torch/nn/modules/conv.h>

/// Convolutions that keep their input only where the weight needs a gradient. Options as in
/// torch::nn: stride, padding (kSame and kValid too), dilation, groups, padding_mode.

namespace brim::nn {

// Torch's forward is not virtual: layer.h says what follows from that.
// NOLINTBEGIN(bugprone-derived-method-shadowing-base-method)

/// torch::nn::Conv1d that keeps its input only if the weight is trained.
BRIM_LAYER(Conv1d, ProductLayer, const at::Tensor&);
/// torch::nn::Conv2d that keeps its input only if the weight is trained.
BRIM_LAYER(Conv2d, ProductLayer, const at::Tensor&);
/// torch::nn::Conv3d that keeps its input only if the weight is trained.
BRIM_LAYER(Conv3d, ProductLayer, const at::Tensor&);

/// torch::nn::ConvTranspose1d that keeps its input only if the weight is trained.
struct BRIM_API ConvTranspose1dImpl
    : ProductLayer<ConvTranspose1dImpl, torch::nn::ConvTranspose1dImpl> {
  using ProductLayer::ProductLayer;

  /// @param output_size of the last dimensions alone, or of all of them
  /// @throws c10::ValueError for a size that the stride does not allow
  at::Tensor forward(const at::Tensor& input,
                     const std::optional<at::IntArrayRef>& output_size = std::nullopt);
};
TORCH_MODULE(ConvTranspose1d);

/// torch::nn::ConvTranspose2d that keeps its input only if the weight is trained.
struct BRIM_API ConvTranspose2dImpl
    : ProductLayer<ConvTranspose2dImpl, torch::nn::ConvTranspose2dImpl> {
  using ProductLayer::ProductLayer;

  at::Tensor forward(const at::Tensor& input,
                     const std::optional<at::IntArrayRef>& output_size = std::nullopt);
};
TORCH_MODULE(ConvTranspose2d);

/// torch::nn::ConvTranspose3d that keeps its input only if the weight is trained.
struct BRIM_API ConvTranspose3dImpl
    : ProductLayer<ConvTranspose3dImpl, torch::nn::ConvTranspose3dImpl> {
  using ProductLayer::ProductLayer;

  at::Tensor forward(const at::Tensor& input,
                     const std::optional<at::IntArrayRef>& output_size = std::nullopt);
};
TORCH_MODULE(ConvTranspose3d);

// NOLINTEND(bugprone-derived-method-shadowing-base-method)

}  // namespace brim::nn
