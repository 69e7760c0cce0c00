#pragma once

#include <brim/nn/modules.h>
#include <torch/nn/modules/container/any.h>

#include <memory>
#include <string>
#include <vector>

// The layers that a model holds in containers, and which of ours stands for which of torch::nn.

namespace brim::nn {

template <class TheirsT, class OursT>
struct LayerPair {
  using Theirs = TheirsT;
  using Ours = OursT;
};

template <class Visit, class... Impls>
void for_each_of(Visit& visit, Layers<Impls...> /*list*/) {
  (visit(LayerPair<typename Impls::Theirs, Impls>()), ...);
}

/// Calls `visit` with the LayerPair of every layer of torch::nn that brim has a counterpart for.
template <class Visit>
void for_each_layer_pair(Visit visit) {
  visit(LayerPair<torch::nn::Conv1dImpl, Conv1dImpl>());
  visit(LayerPair<torch::nn::Conv2dImpl, Conv2dImpl>());
  visit(LayerPair<torch::nn::Conv3dImpl, Conv3dImpl>());
  visit(LayerPair<torch::nn::ConvTranspose1dImpl, ConvTranspose1dImpl>());
  visit(LayerPair<torch::nn::ConvTranspose2dImpl, ConvTranspose2dImpl>());
  visit(LayerPair<torch::nn::ConvTranspose3dImpl, ConvTranspose3dImpl>());
  visit(LayerPair<torch::nn::LinearImpl, LinearImpl>());
  visit(LayerPair<torch::nn::BatchNorm1dImpl, BatchNorm1dImpl>());
  visit(LayerPair<torch::nn::BatchNorm2dImpl, BatchNorm2dImpl>());
  visit(LayerPair<torch::nn::BatchNorm3dImpl, BatchNorm3dImpl>());
  visit(LayerPair<torch::nn::LayerNormImpl, LayerNormImpl>());
  visit(LayerPair<torch::nn::GroupNormImpl, GroupNormImpl>());
  for_each_of(visit, Activations());
  visit(LayerPair<torch::nn::DropoutImpl, DropoutImpl>());
  visit(LayerPair<torch::nn::MaxPool1dImpl, MaxPool1dImpl>());
  visit(LayerPair<torch::nn::MaxPool2dImpl, MaxPool2dImpl>());
  visit(LayerPair<torch::nn::MaxPool3dImpl, MaxPool3dImpl>());
  visit(LayerPair<torch::nn::AvgPool1dImpl, AvgPool1dImpl>());
  visit(LayerPair<torch::nn::AvgPool2dImpl, AvgPool2dImpl>());
  visit(LayerPair<torch::nn::AvgPool3dImpl, AvgPool3dImpl>());
  visit(LayerPair<torch::nn::AdaptiveAvgPool1dImpl, AdaptiveAvgPool1dImpl>());
  visit(LayerPair<torch::nn::AdaptiveAvgPool2dImpl, AdaptiveAvgPool2dImpl>());
  visit(LayerPair<torch::nn::AdaptiveAvgPool3dImpl, AdaptiveAvgPool3dImpl>());
}

/// A layer, which is a module without children, in one of its places.
struct LayerPlace {
  torch::nn::Module* parent;  // nullptr for the model itself
  std::string key;            // its name in the parent
  std::string name;           // in the model
  std::shared_ptr<torch::nn::Module> layer;
};

/// All places below the model; of a model that is itself a layer, that one without a parent or an
/// owner. A container that two parents share is entered once.
std::vector<LayerPlace> layer_places(torch::nn::Module& model);

/// Puts `fresh` where the parent holds the layer. False where the parent is no container, or has
/// registered the layer without holding it as an element.
bool replace(const LayerPlace& place, const torch::nn::AnyModule& fresh);

/// As programs write it: torch::nn::Conv2d for torch::nn::Conv2dImpl.
std::string type_of(const torch::nn::Module& layer);

}  // namespace brim::nn
