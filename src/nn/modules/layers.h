#pragma once

#include <brim/nn/modules.h>
#include <torch/nn/modules/container/any.h>

#include <memory>
#include <string>
#include <vector>

// The layers that a model holds in containers, and which of ours stands for which of torch::nn.

namespace brim::nn {

template <class First, class Second>
struct Joined;

template <class... First, class... Second>
struct Joined<Layers<First...>, Layers<Second...>> {
  using Both = Layers<First..., Second...>;
};

/// The layers that stand for one of torch::nn, `Theirs`.
using ConvertibleLayers =
    Joined<Layers<Conv1dImpl, Conv2dImpl, Conv3dImpl, ConvTranspose1dImpl, ConvTranspose2dImpl,
                  ConvTranspose3dImpl, LinearImpl, BatchNorm1dImpl, BatchNorm2dImpl,
                  BatchNorm3dImpl, LayerNormImpl, GroupNormImpl, DropoutImpl, MaxPool1dImpl,
                  MaxPool2dImpl, MaxPool3dImpl, AvgPool1dImpl, AvgPool2dImpl, AvgPool3dImpl,
                  AdaptiveAvgPool1dImpl, AdaptiveAvgPool2dImpl, AdaptiveAvgPool3dImpl>,
           Activations>::Both;

/// Calls `visit.operator()<Ours>()` for each layer of a list.
template <class Visit, class... Ours>
void for_each_layer(Layers<Ours...> /*list*/, Visit visit) {
  (visit.template operator()<Ours>(), ...);
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
