#include "nn/modules/layers.h"

#include <brim/nn/modules.h>
#include <c10/util/Type.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <string_view>
#include <typeinfo>
#include <unordered_set>
#include <utility>

namespace brim::nn {

using torch::nn::AnyModule;
using torch::nn::Module;

namespace {

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

template <class Theirs, class New>
AnyModule make(const Module& layer) {
  return AnyModule(std::make_shared<New>(static_cast<const Theirs&>(layer)));
}

template <class Theirs>
bool derives(const Module& layer) {
  return dynamic_cast<const Theirs*>(&layer) != nullptr;
}

template <class Ours>
void set_recompute(Module& layer, Recompute level) {
  if constexpr (requires(Ours ours) { ours.recompute; }) {
    const bool is_if_short = level == Recompute::automatic;
    static_cast<Ours&>(layer).recompute = is_if_short ? Again(Again::kIfShort) : Again(true);
  }
  if constexpr (requires(Ours ours) { ours.runs_again; }) {
    static_cast<Ours&>(layer).runs_again = level >= Recompute::products;
  }
}

template <class Ours>
LayerRule rule() {
  using Theirs = typename Ours::Theirs;
  return {typeid(Theirs),     typeid(Ours),         derives<Theirs>,
          make<Theirs, Ours>, make<Theirs, Theirs>, set_recompute<Ours>};
}

template <class... Ours>
std::vector<LayerRule> rules(Layers<Ours...> /*list*/) {
  return {rule<Ours>()...};
}

/// What a Sequential calls the layer through; empty for other parents.
AnyModule element_of(const Module& parent, const std::shared_ptr<Module>& layer) {
  if (const auto* const sequential = dynamic_cast<const torch::nn::SequentialImpl*>(&parent)) {
    for (const AnyModule& element : *sequential) {
      if (element.ptr() == layer) {
        return element;
      }
    }
  }
  return {};
}

}  // namespace

const std::vector<LayerRule>& layer_rules() {
  static const std::vector<LayerRule> all = rules(ConvertibleLayers());
  return all;
}

const LayerRule* rule_for(const Module& layer, std::type_index LayerRule::* type) {
  for (const LayerRule& rule : layer_rules()) {
    if (rule.*type == typeid(layer)) {
      return &rule;
    }
  }
  return nullptr;
}

std::vector<LayerPlace> layer_places(Module& model) {
  std::vector<LayerPlace> places;
  std::unordered_set<const Module*> visited;
  const auto visit = [&](const auto& self, Module& parent, const std::string& prefix) -> void {
    if (!visited.insert(&parent).second) {
      return;
    }
    for (const auto& item : parent.named_children()) {
      if (const std::shared_ptr<Module>& child = item.value()) {
        if (child->children().empty()) {
          places.push_back(
              {&parent, item.key(), prefix + item.key(), child, element_of(parent, child)});
        } else {
          self(self, *child, prefix + item.key() + '.');
        }
      }
    }
  };
  visit(visit, model, "");
  if (places.empty() && model.children().empty()) {
    places.push_back({nullptr, "", "", {std::shared_ptr<Module>(), &model}, {}});
  }
  return places;
}

bool replace(const LayerPlace& place, const std::shared_ptr<Module>& fresh,
             const AnyModule& element) {
  const std::shared_ptr<Module>& old = place.layer;
  bool held = false;  // also by an earlier call, where the container holds the layer twice
  if (auto* const sequential = dynamic_cast<torch::nn::SequentialImpl*>(place.parent)) {
    for (AnyModule& each : *sequential) {
      const std::shared_ptr<Module> module = each.ptr();
      if (module == old) {
        each = element;
      }
      held = held || module == old || module == fresh;
    }
  } else if (auto* const list = dynamic_cast<torch::nn::ModuleListImpl*>(place.parent)) {
    for (std::shared_ptr<Module>& each : *list) {
      held = held || each == old || each == fresh;
      if (each == old) {
        each = fresh;
      }
    }
  } else if (auto* const dict = dynamic_cast<torch::nn::ModuleDictImpl*>(place.parent)) {
    held = dict->contains(place.key) && (*dict)[place.key] == old;
    if (held) {
      dict->update(
          std::vector<std::pair<std::string, std::shared_ptr<Module>>>{{place.key, fresh}});
    }
  }
  if (held) {
    place.parent->replace_module(place.key, fresh);
  }
  return held;
}

std::string type_of(const Module& layer) {
  constexpr std::string_view kImpl = "Impl";
  std::string name = c10::demangle(typeid(layer).name());
  if (name.ends_with(kImpl)) {
    name.resize(name.size() - kImpl.size());
  }
  return name;
}

}  // namespace brim::nn
