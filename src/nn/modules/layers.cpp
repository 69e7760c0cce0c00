#include "nn/modules/layers.h"

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
          places.push_back({&parent, item.key(), prefix + item.key(), child});
        } else {
          self(self, *child, prefix + item.key() + '.');
        }
      }
    }
  };
  visit(visit, model, "");
  if (places.empty() && model.children().empty()) {
    places.push_back({nullptr, "", "", {std::shared_ptr<Module>(), &model}});
  }
  return places;
}

bool replace(const LayerPlace& place, const AnyModule& fresh) {
  const std::shared_ptr<Module>& old = place.layer;
  const std::shared_ptr<Module> fresh_module = fresh.ptr();
  bool held = false;  // also by an earlier call, where the container holds the layer twice
  if (auto* const sequential = dynamic_cast<torch::nn::SequentialImpl*>(place.parent)) {
    for (AnyModule& element : *sequential) {
      const std::shared_ptr<Module> module = element.ptr();
      if (module == old) {
        element = fresh;
      }
      held = held || module == old || module == fresh_module;
    }
  } else if (auto* const list = dynamic_cast<torch::nn::ModuleListImpl*>(place.parent)) {
    for (std::shared_ptr<Module>& element : *list) {
      held = held || element == old || element == fresh_module;
      if (element == old) {
        element = fresh_module;
      }
    }
  } else if (auto* const dict = dynamic_cast<torch::nn::ModuleDictImpl*>(place.parent)) {
    held = dict->contains(place.key) && (*dict)[place.key] == old;
    if (held) {
      dict->update(
          std::vector<std::pair<std::string, std::shared_ptr<Module>>>{{place.key, fresh_module}});
    }
  }
  if (held) {
    place.parent->replace_module(place.key, fresh_module);
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
