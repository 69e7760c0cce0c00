#include <brim/nn/convert.h>
#include <brim/text_table.h>
#include <fnmatch.h>

#include <memory>
#include <ostream>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "nn/modules/layers.h"

namespace brim::nn {

using torch::nn::AnyModule;
using torch::nn::Module;

LayerChoice::LayerChoice(std::string pattern)
    : pattern_(std::move(pattern)),
      choose_([pattern = pattern_](const std::string& name, const Module& /*module*/) {
        return fnmatch(pattern.c_str(), name.c_str(), FNM_NOESCAPE) == 0;
      }),
      inside_(true) {}

/// The modules that any of some choices means.
class ChosenModules {
 public:
  ChosenModules(const char* option, const std::vector<LayerChoice>& choices, const Module& model) {
    const auto modules = model.named_modules("", /*include_self=*/false);
    for (const LayerChoice& choice : choices) {
      bool found = add(choice, "", model);
      for (const auto& item : modules) {
        found = add(choice, item.key(), *item.value()) || found;
      }
      TORCH_CHECK_VALUE(found || choice.pattern_.empty(), option, ": the pattern '",
                        choice.pattern_, "' matches no name in the model");
    }
  }

  bool contains(const Module& module) const { return modules_.contains(&module); }

 private:
  bool add(const LayerChoice& choice, const std::string& name, const Module& module) {
    if (!choice.choose_(name, module)) {
      return false;
    }
    modules_.insert(&module);
    if (choice.inside_) {
      for (const std::shared_ptr<Module>& inner : module.modules(/*include_self=*/false)) {
        modules_.insert(inner.get());
      }
    }
    return true;
  }

  std::unordered_set<const Module*> modules_;
};

namespace {

/// Why convert() does not know a layer.
const char* why_unknown(const Module& layer) {
  for (const LayerRule& rule : layer_rules()) {
    if (rule.derives(layer)) {
      return "it is a class of its own, derived from a layer of torch::nn";
    }
  }
  return "brim has no counterpart";
}

/// Replaces layers, and reports.
class Replacing {
 public:
  explicit Replacing(Module& model) : places_(layer_places(model)) {}

  [[nodiscard]] const std::vector<LayerPlace>& places() const { return places_; }

  void keep(const LayerPlace& place, std::string reason) {
    report_.kept.push_back({place.name, type_of(*place.layer), std::move(reason)});
  }

  /// The new layer, or nothing where the old one has to stay.
  std::shared_ptr<Module> replace_with(const LayerPlace& place, LayerRule::Make make) {
    auto made = made_.find(place.layer.get());
    if (made == made_.end()) {
      made = made_.emplace(place.layer.get(), make(*place.layer)).first;
    }
    if (replace(place, made->second.ptr(), made->second)) {
      report_.replaced.push_back({place.name, type_of(*place.layer), ""});
      return made->second.ptr();
    }
    keep(place, place.parent == nullptr
                    ? "it is the model itself, and the program holds it by its type"
                    : "its parent, " + type_of(*place.parent) +
                          ", is no container and may call it through a member of its own");
    return nullptr;
  }

  ConversionReport report() { return std::move(report_); }

 private:
  std::vector<LayerPlace> places_;  // with the old layers, so that no address comes twice
  std::unordered_map<const Module*, AnyModule> made_;  // by the old layer
  ConversionReport report_;
};

Recompute level_of(const ConvertOptions& options) {
  return options.automatic   ? Recompute::automatic
         : options.products  ? Recompute::products
         : options.recompute ? Recompute::cheap
                             : Recompute::nothing;
}

}  // namespace

ConversionReport convert(Module& model, const ConvertOptions& options) {
  const ChosenModules only("only", options.only, model);
  const ChosenModules skip("skip", options.skip, model);
  Replacing replacing(model);
  for (const LayerPlace& place : replacing.places()) {
    const Module& layer = *place.layer;
    const LayerRule* const ours = rule_for(layer, &LayerRule::ours);
    const LayerRule* rule = ours;
    std::shared_ptr<Module> result;
    if (!options.only.empty() && !only.contains(layer)) {
      replacing.keep(place, "not chosen by `only`");
    } else if (skip.contains(layer)) {
      replacing.keep(place, "left out by `skip`");
    } else if (ours != nullptr) {
      replacing.keep(place, "it is brim's already");
      result = place.layer;
    } else if (rule = rule_for(layer, &LayerRule::theirs); rule != nullptr) {
      result = replacing.replace_with(place, rule->to_ours);
    } else {
      replacing.keep(place, why_unknown(layer));
    }
    if (const Recompute level = level_of(options);
        level != Recompute::nothing && result != nullptr) {
      rule->recompute(*result, level);
    }
  }
  return replacing.report();
}

ConversionReport restore(Module& model) {
  Replacing replacing(model);
  for (const LayerPlace& place : replacing.places()) {
    if (const LayerRule* const rule = rule_for(*place.layer, &LayerRule::ours)) {
      replacing.replace_with(place, rule->to_theirs);
    }
  }
  return replacing.report();
}

std::ostream& operator<<(std::ostream& stream, const ConversionReport& report) {
  const std::size_t count = report.replaced.size();
  stream << count << (count == 1 ? " layer" : " layers") << " replaced, " << report.kept.size()
         << " kept as they are\n";
  if (report.kept.empty()) {
    return stream;
  }
  std::vector<std::vector<std::string>> rows;
  rows.reserve(report.kept.size());
  for (const ConvertedLayer& layer : report.kept) {
    rows.push_back({layer.name.empty() ? "(model)" : layer.name, layer.type, layer.reason});
  }
  return stream << '\n' << text_table({"layer", "type", "kept because"}, rows, 3) << '\n';
}

}  // namespace brim::nn
