#pragma once

#include <brim/nn/saving.h>
#include <torch/nn/modules/container/any.h>

#include <memory>
#include <string>
#include <typeindex>
#include <vector>

// The layers that a model holds in containers, and which of ours stands for which of torch::nn.

namespace brim::nn {

/// A layer of torch::nn and ours that stands for it. What is made shares the tensors of `layer`.
struct LayerRule {
  using Make = torch::nn::AnyModule (*)(const torch::nn::Module& layer);

  std::type_index theirs;
  std::type_index ours;
  bool (*derives)(const torch::nn::Module& layer);  // from torch::nn's
  Make to_ours;
  Make to_theirs;
  void (*recompute)(torch::nn::Module& ours, Recompute level);
};

const std::vector<LayerRule>& layer_rules();

/// The rule for a layer of torch::nn (`&LayerRule::theirs`) or of ours (`&LayerRule::ours`), or
/// nullptr.
const LayerRule* rule_for(const torch::nn::Module& layer, std::type_index LayerRule::* type);

/// A layer, which is a module without children, in one of its places.
struct LayerPlace {
  torch::nn::Module* parent;  // nullptr for the model itself
  std::string key;            // its name in the parent
  std::string name;           // in the model
  std::shared_ptr<torch::nn::Module> layer;
  torch::nn::AnyModule element;  // a Sequential's, which calls the layer; else empty
};

/// All places below the model; of a model that is itself a layer, that one without a parent or an
/// owner. A container that two parents share is entered once.
std::vector<LayerPlace> layer_places(torch::nn::Module& model);

/// Puts `fresh` where the parent holds the layer, in a Sequential as `element`. False where the
/// parent is no container, or has registered the layer without holding it as an element.
bool replace(const LayerPlace& place, const std::shared_ptr<torch::nn::Module>& fresh,
             const torch::nn::AnyModule& element);

/// As programs write it: torch::nn::Conv2d for torch::nn::Conv2dImpl.
std::string type_of(const torch::nn::Module& layer);

}  // namespace brim::nn
