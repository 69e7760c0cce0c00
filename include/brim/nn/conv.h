#pragma once

#include <brim/nn/layer.h>
#include <torch/nn/modules/conv.h>

/// Convolutions that keep their input only where the weight needs a gradient. Options as in
/// torch::nn: stride, padding (kSame and kValid too), dilation, groups, padding_mode.

namespace brim::nn {

// Torch's forward is not virtual: layer.h says what follows from that.
// NOLINTBEGIN(bugprone-derived-method-shadowing-base-method)

class BRIM_API Conv1dImpl : public Layer<Conv1dImpl, torch::nn::Conv1dImpl> {
 public:
  using Layer::Layer;

  at::Tensor forward(const at::Tensor& input);

  /// Keep no input where the layer before can give it again cheaply (functional.h, `conv`).
  bool recompute = false;
};
TORCH_MODULE(Conv1d);

class BRIM_API Conv2dImpl : public Layer<Conv2dImpl, torch::nn::Conv2dImpl> {
 public:
  using Layer::Layer;

  at::Tensor forward(const at::Tensor& input);

  /// Keep no input where the layer before can give it again cheaply (functional.h, `conv`).
  bool recompute = false;
};
TORCH_MODULE(Conv2d);

class BRIM_API Conv3dImpl : public Layer<Conv3dImpl, torch::nn::Conv3dImpl> {
 public:
  using Layer::Layer;

  at::Tensor forward(const at::Tensor& input);

  /// Keep no input where the layer before can give it again cheaply (functional.h, `conv`).
  bool recompute = false;
};
TORCH_MODULE(Conv3d);

class BRIM_API ConvTranspose1dImpl
    : public Layer<ConvTranspose1dImpl, torch::nn::ConvTranspose1dImpl> {
 public:
  using Layer::Layer;

  /// @param output_size of the last dimensions alone, or of all of them
  /// @throws c10::ValueError for a size that the stride does not allow
  at::Tensor forward(const at::Tensor& input,
                     const std::optional<at::IntArrayRef>& output_size = std::nullopt);

  bool recompute = false;
};
TORCH_MODULE(ConvTranspose1d);

class BRIM_API ConvTranspose2dImpl
    : public Layer<ConvTranspose2dImpl, torch::nn::ConvTranspose2dImpl> {
 public:
  using Layer::Layer;

  at::Tensor forward(const at::Tensor& input,
                     const std::optional<at::IntArrayRef>& output_size = std::nullopt);

  bool recompute = false;
};
TORCH_MODULE(ConvTranspose2d);

class BRIM_API ConvTranspose3dImpl
    : public Layer<ConvTranspose3dImpl, torch::nn::ConvTranspose3dImpl> {
 public:
  using Layer::Layer;

  at::Tensor forward(const at::Tensor& input,
                     const std::optional<at::IntArrayRef>& output_size = std::nullopt);

  bool recompute = false;
};
TORCH_MODULE(ConvTranspose3d);

// NOLINTEND(bugprone-derived-method-shadowing-base-method)

}  // namespace brim::nn
