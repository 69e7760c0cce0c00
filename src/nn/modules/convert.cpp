#include <brim/nn/convert.h>
#include <brim/nn/modules.h>
#include <c10/util/Type.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <memory>
#include <ostream>
#include <string_view>
#include <typeindex>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace brim::nn {
namespace {

using torch::nn::AnyModule;
using torch::nn::Module;

// -- Which layer stands for which --------------------------------------------------------------

using Make = AnyModule (*)(const Module& layer, bool recompute);

/// A `New` that shares the tensors of `layer`, which is a `Theirs` or derived from it.
template <class Theirs, class New>
AnyModule make(const Module& layer, [[maybe_unused]] bool recompute) {
  auto fresh = std::make_shared<New>(static_cast<const Theirs&>(layer));
  if constexpr (requires { fresh->recompute; }) {
    fresh->recompute = recompute;
  }
  return AnyModule(std::move(fresh));
}

template <class Theirs>
bool derives(const Module& layer) {
  return dynamic_cast<const Theirs*>(&layer) != nullptr;
}

struct Pair {
  std::type_index theirs;
  std::type_index ours;
  Make to_ours;
  Make to_theirs;
  bool (*derives)(const Module& layer);
};

template <class Theirs, class Ours>
Pair pair() {
  return {typeid(Theirs), typeid(Ours), make<Theirs, Ours>, make<Theirs, Theirs>, derives<Theirs>};
}

const std::vector<Pair>& pairs() {
  static const std::vector<Pair> all{
      pair<torch::nn::Conv1dImpl, Conv1dImpl>(),
      pair<torch::nn::Conv2dImpl, Conv2dImpl>(),
      pair<torch::nn::Conv3dImpl, Conv3dImpl>(),
      pair<torch::nn::ConvTranspose1dImpl, ConvTranspose1dImpl>(),
      pair<torch::nn::ConvTranspose2dImpl, ConvTranspose2dImpl>(),
      pair<torch::nn::ConvTranspose3dImpl, ConvTranspose3dImpl>(),
      pair<torch::nn::LinearImpl, LinearImpl>(),
      pair<torch::nn::BatchNorm1dImpl, BatchNorm1dImpl>(),
      pair<torch::nn::BatchNorm2dImpl, BatchNorm2dImpl>(),
      pair<torch::nn::BatchNorm3dImpl, BatchNorm3dImpl>(),
      pair<torch::nn::LayerNormImpl, LayerNormImpl>(),
      pair<torch::nn::GroupNormImpl, GroupNormImpl>(),
      pair<torch::nn::ReLUImpl, ReLUImpl>(),
      pair<torch::nn::ReLU6Impl, ReLU6Impl>(),
      pair<torch::nn::LeakyReLUImpl, LeakyReLUImpl>(),
      pair<torch::nn::HardtanhImpl, HardtanhImpl>(),
      pair<torch::nn::GELUImpl, GELUImpl>(),
      pair<torch::nn::SiLUImpl, SiLUImpl>(),
      pair<torch::nn::DropoutImpl, DropoutImpl>(),
      pair<torch::nn::MaxPool1dImpl, MaxPool1dImpl>(),
      pair<torch::nn::MaxPool2dImpl, MaxPool2dImpl>(),
      pair<torch::nn::MaxPool3dImpl, MaxPool3dImpl>(),
      pair<torch::nn::AvgPool1dImpl, AvgPool1dImpl>(),
      pair<torch::nn::AvgPool2dImpl, AvgPool2dImpl>(),
      pair<torch::nn::AvgPool3dImpl, AvgPool3dImpl>(),
      pair<torch::nn::AdaptiveAvgPool1dImpl, AdaptiveAvgPool1dImpl>(),
      pair<torch::nn::AdaptiveAvgPool2dImpl, AdaptiveAvgPool2dImpl>(),
      pair<torch::nn::AdaptiveAvgPool3dImpl, AdaptiveAvgPool3dImpl>(),
  };
  return all;
}

/// As programs write it: torch::nn::Conv2d for torch::nn::Conv2dImpl.
std::string type_of(const Module& layer) {
  constexpr std::string_view kImpl = "Impl";
  std::string name = c10::demangle(typeid(layer).name());
  if (name.ends_with(kImpl)) {
    name.resize(name.size() - kImpl.size());
  }
  return name;
}

// -- Replacing inside a container --------------------------------------------------------------

/// Puts `fresh` where `parent` holds `old` under `name`. False where the parent is no container, or
/// has registered `old` without holding it as an element.
bool replace(Module& parent, const std::string& name, const std::shared_ptr<Module>& old,
             const AnyModule& fresh) {
  const std::shared_ptr<Module> fresh_module = fresh.ptr();
  bool held = false;
  if (auto* const sequential = dynamic_cast<torch::nn::SequentialImpl*>(&parent)) {
    for (AnyModule& element : *sequential) {
      const std::shared_ptr<Module> module = element.ptr();
      if (module == old) {
        element = fresh;
      }
      held = held || module == old || module == fresh_module;
    }
  } else if (auto* const list = dynamic_cast<torch::nn::ModuleListImpl*>(&parent)) {
    for (std::shared_ptr<Module>& element : *list) {
      held = held || element == old || element == fresh_module;
      if (element == old) {
        element = fresh_module;
      }
    }
  } else if (auto* const dict = dynamic_cast<torch::nn::ModuleDictImpl*>(&parent)) {
    held = dict->contains(name) && (*dict)[name] == old;
    if (held) {
      dict->update(
          std::vector<std::pair<std::string, std::shared_ptr<Module>>>{{name, fresh_module}});
    }
  }
  if (held) {
    parent.replace_module(name, fresh_module);
  }
  return held;
}

// -- Walking over a model ----------------------------------------------------------------------

class Walk {
 public:
  Walk(bool to_ours, const ConvertOptions& options) : to_ours_(to_ours), options_(options) {
    for (const Pair& pair : pairs()) {
      makes_.emplace(to_ours ? pair.theirs : pair.ours, to_ours ? pair.to_ours : pair.to_theirs);
    }
  }

  ConversionReport run(Module& model) {
    if (const auto found = makes_.find(typeid(model)); found != makes_.end()) {
      keep("", model, "it is the model itself, and the program holds it by its type");
    } else if (model.children().empty()) {
      keep_unknown("", model);
    }
    visit(model, "");
    return std::move(report_);
  }

 private:
  void visit(Module& parent, const std::string& prefix) {
    if (!visited_.insert(&parent).second) {
      return;
    }
    for (const auto& item : parent.named_children()) {  // a copy: replacing does not disturb it
      if (const std::shared_ptr<Module>& child = item.value()) {
        const std::string name = prefix + item.key();
        if (const auto found = makes_.find(typeid(*child)); found != makes_.end()) {
          replace_child(parent, item.key(), name, child, found->second);
        } else if (child->children().empty()) {
          keep_unknown(name, *child);
        } else {
          visit(*child, name + '.');
        }
      }
    }
  }

  void replace_child(Module& parent, const std::string& key, const std::string& name,
                     const std::shared_ptr<Module>& child, Make make_new) {
    if (options_.choose && !options_.choose(name, *child)) {
      keep(name, *child, "`choose` left it out");
      return;
    }
    auto made = made_.find(child.get());
    if (made == made_.end()) {
      made = made_.emplace(child.get(), make_new(*child, options_.recompute)).first;
      old_.push_back(child);
    }
    if (replace(parent, key, child, made->second)) {
      report_.replaced.push_back({name, type_of(*child), ""});
    } else {
      keep(name, *child,
           "its parent, " + type_of(parent) +
               ", is no container and may call it through a member of its own");
    }
  }

  void keep(const std::string& name, const Module& layer, std::string reason) {
    report_.kept.push_back({name, type_of(layer), std::move(reason)});
  }

  /// A module without children that there is nothing to replace with. restore() is not concerned.
  void keep_unknown(const std::string& name, const Module& layer) {
    if (!to_ours_) {
      return;
    }
    for (const Pair& pair : pairs()) {
      if (pair.ours == typeid(layer)) {
        return keep(name, layer, "it is a layer of brim already");
      }
      if (pair.derives(layer)) {
        return keep(name, layer, "it is a class of its own, derived from a layer of torch::nn");
      }
    }
    keep(name, layer, "brim has no such layer");
  }

  bool to_ours_;
  const ConvertOptions& options_;
  std::unordered_map<std::type_index, Make> makes_;
  std::unordered_map<const Module*, AnyModule> made_;  // by the old layer
  std::vector<std::shared_ptr<Module>> old_;           // so that no address comes twice
  std::unordered_set<const Module*> visited_;
  ConversionReport report_;
};

}  // namespace

ConversionReport convert(Module& model, const ConvertOptions& options) {
  return Walk(true, options).run(model);
}

ConversionReport restore(Module& model) {
  const ConvertOptions options;
  return Walk(false, options).run(model);
}

std::ostream& operator<<(std::ostream& stream, const ConversionReport& report) {
  stream << report.replaced.size() << " replaced, " << report.kept.size() << " kept\n";
  for (const ConvertedLayer& layer : report.replaced) {
    stream << "  " << layer.name << ": " << layer.type << '\n';
  }
  for (const ConvertedLayer& layer : report.kept) {
    stream << "  " << layer.name << ": " << layer.type << " kept, " << layer.reason << '\n';
  }
  return stream;
}

}  // namespace brim::nn
