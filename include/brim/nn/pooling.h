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
BRIM_LAYER(MaxPool1d, MaxPoolLayer, const at::Tensor&);
/// torch::nn::MaxPool2d that keeps one byte per output element.
BRIM_LAYER(MaxPool2d, MaxPoolLayer, const at::Tensor&);
/// torch::nn::MaxPool3d that keeps one byte per output element.
BRIM_LAYER(MaxPool3d, MaxPoolLayer, const at::Tensor&);
/// torch::nn::AvgPool1d that keeps nothing.
BRIM_LAYER(AvgPool1d, Layer, const at::Tensor&);
/// torch::nn::AvgPool2d that keeps nothing.
BRIM_LAYER(AvgPool2d, Layer, const at::Tensor&);
/// torch::nn::AvgPool3d that keeps nothing.
BRIM_LAYER(AvgPool3d, Layer, const at::Tensor&);
/// torch::nn::AdaptiveAvgPool1d that keeps nothing.
BRIM_LAYER(AdaptiveAvgPool1d, Layer, const at::Tensor&);
/// torch::nn::AdaptiveAvgPool2d that keeps nothing.
BRIM_LAYER(AdaptiveAvgPool2d, Layer, const at::Tensor&);
/// torch::nn::AdaptiveAvgPool3d that keeps nothing.
BRIM_LAYER(AdaptiveAvgPool3d, Layer, const at::Tensor&);

// NOLINTEND(bugprone-derived-method-shadowing-base-method)

}  // namespace brim::nn
