#pragma once

#include <brim/nn/layer.h>
#include <torch/nn/modules/pooling.h>

#include <tuple>

/// A MaxPool keeps one byte per output element if its window has at most 256 places; the others
/// keep nothing.

namespace brim::nn {

// Torch's forward is not virtual: layer.h says what follows from that.
// NOLINTBEGIN(bugprone-derived-method-shadowing-base-method)

/// What the three have in common.
template <class Impl, class Base>
// NOLINTNEXTLINE(bugprone-crtp-constructor-accessibility): as the base classes of torch::nn
class BRIM_API MaxPoolLayer : public Layer<Impl, Base> {
 public:
  using Layer<Impl, Base>::Layer;

  /// The maxima and their indices, as torch::nn gives them.
  std::tuple<at::Tensor, at::Tensor> forward_with_indices(const at::Tensor& input) {
    return this->in_region([&] { return Base::forward_with_indices(input); });
  }
};

/// torch::nn::MaxPool1d that keeps one byte per output element.
struct BRIM_API MaxPool1dImpl : MaxPoolLayer<MaxPool1dImpl, torch::nn::MaxPool1dImpl> {
  using MaxPoolLayer::MaxPoolLayer;

  at::Tensor forward(const at::Tensor& input) { return in_region(input); }
};
TORCH_MODULE(MaxPool1d);

/// torch::nn::MaxPool2d that keeps one byte per output element.
struct BRIM_API MaxPool2dImpl : MaxPoolLayer<MaxPool2dImpl, torch::nn::MaxPool2dImpl> {
  using MaxPoolLayer::MaxPoolLayer;

  at::Tensor forward(const at::Tensor& input) { return in_region(input); }
};
TORCH_MODULE(MaxPool2d);

/// torch::nn::MaxPool3d that keeps one byte per output element.
struct BRIM_API MaxPool3dImpl : MaxPoolLayer<MaxPool3dImpl, torch::nn::MaxPool3dImpl> {
  using MaxPoolLayer::MaxPoolLayer;

  at::Tensor forward(const at::Tensor& input) { return in_region(input); }
};
TORCH_MODULE(MaxPool3d);

/// torch::nn::AvgPool1d that keeps nothing.
struct BRIM_API AvgPool1dImpl : Layer<AvgPool1dImpl, torch::nn::AvgPool1dImpl> {
  using Layer::Layer;

  at::Tensor forward(const at::Tensor& input) { return in_region(input); }
};
TORCH_MODULE(AvgPool1d);

/// torch::nn::AvgPool2d that keeps nothing.
struct BRIM_API AvgPool2dImpl : Layer<AvgPool2dImpl, torch::nn::AvgPool2dImpl> {
  using Layer::Layer;

  at::Tensor forward(const at::Tensor& input) { return in_region(input); }
};
TORCH_MODULE(AvgPool2d);

/// torch::nn::AvgPool3d that keeps nothing.
struct BRIM_API AvgPool3dImpl : Layer<AvgPool3dImpl, torch::nn::AvgPool3dImpl> {
  using Layer::Layer;

  at::Tensor forward(const at::Tensor& input) { return in_region(input); }
};
TORCH_MODULE(AvgPool3d);

/// torch::nn::AdaptiveAvgPool1d that keeps nothing.
struct BRIM_API AdaptiveAvgPool1dImpl
    : Layer<AdaptiveAvgPool1dImpl, torch::nn::AdaptiveAvgPool1dImpl> {
  using Layer::Layer;

  at::Tensor forward(const at::Tensor& input) { return in_region(input); }
};
TORCH_MODULE(AdaptiveAvgPool1d);

/// torch::nn::AdaptiveAvgPool2d that keeps nothing.
struct BRIM_API AdaptiveAvgPool2dImpl
    : Layer<AdaptiveAvgPool2dImpl, torch::nn::AdaptiveAvgPool2dImpl> {
  using Layer::Layer;

  at::Tensor forward(const at::Tensor& input) { return in_region(input); }
};
TORCH_MODULE(AdaptiveAvgPool2d);

/// torch::nn::AdaptiveAvgPool3d that keeps nothing.
struct BRIM_API AdaptiveAvgPool3dImpl
    : Layer<AdaptiveAvgPool3dImpl, torch::nn::AdaptiveAvgPool3dImpl> {
  using Layer::Layer;

  at::Tensor forward(const at::Tensor& input) { return in_region(input); }
};
TORCH_MODULE(AdaptiveAvgPool3d);

// NOLINTEND(bugprone-derived-method-shadowing-base-method)

}  // namespace brim::nn
