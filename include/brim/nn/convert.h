#pragma once

#include <brim/export.h>

#include <concepts>
#include <functional>
#include <iosfwd>
#include <string>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}

namespace brim::nn {

/// What became of one layer.
struct ConvertedLayer {
  std::string name;    // dotted, as in named_modules(); empty for the model itself
  std::string type;    // what it was, such as "torch::nn::Conv2d"
  std::string reason;  // why it was kept; empty where it was replaced
};

/// What convert() or restore() did. A layer that two parents share is listed under each name.
struct ConversionReport {
  std::vector<ConvertedLayer> replaced;
  std::vector<ConvertedLayer> kept;
};

/// Two counts, and a table of the layers that were kept.
BRIM_API std::ostream& operator<<(std::ostream& stream, const ConversionReport& report);

/// Chooses layers: by a pattern for their names ("encoder.*"; with *, ? and [seq]), by a type, or
/// by a function. A pattern and a type also choose what is inside such a module.
class BRIM_API LayerChoice {
 public:
  using Function = std::function<bool(const std::string& name, const torch::nn::Module& module)>;

  // Implicit, so that options can be written as {"encoder.*", is_small}.
  LayerChoice(const char* pattern) : LayerChoice(std::string(pattern)) {}
  LayerChoice(std::string pattern);
  template <std::convertible_to<Function> F>
  LayerChoice(F choose) : choose_(std::move(choose)) {}

  /// Modules of this type, such as `torch::nn::Conv2dImpl`, and of classes derived from it.
  template <class Impl>
  static LayerChoice type() {
    LayerChoice choice([](const std::string& /*name*/, const auto& module) {
      return dynamic_cast<const Impl*>(&module) != nullptr;
    });
    choice.inside_ = true;
    return choice;
  }

 private:
  friend class ChosenModules;
  std::string pattern_;  // for the error where nothing matches
  Function choose_;
  bool inside_ = false;
};

/// Options of convert.
struct ConvertOptions {
  /// Replace these alone; empty means all.
  std::vector<LayerChoice> only = {};
  /// Leave these out.
  std::vector<LayerChoice> skip = {};
  /// Sets `recompute` of convolutions, linear layers and activations, also of those that are brim's
  /// already: they keep nothing that the layers before can recompute cheaply in backward.
  bool recompute = false;
  /// The same, and sets `runs_again` of convolutions and linear layers: those whose output is
  /// larger than their input run again in backward, so that the next layer does not keep it.
  bool products = false;
  /// The same, but all of it is kept until an allocation cannot be served: then values that can be
  /// computed again are dropped, as many as are needed. Counts before the two above.
  bool automatic = false;
};

/// Puts brim's layers in the place of torch::nn's, in place, by exact type. Parameters, buffers,
/// requires_grad, training flag, names and order stay: a new layer shares the tensors of the old
/// one, so an optimizer made before still trains the model. A layer in several places stays one
/// layer.
///
/// C++ has no way to change what a member points to, so only what a container holds is replaced:
/// the elements of torch::nn::Sequential, ModuleList and ModuleDict, of classes derived from those,
/// and of containers inside any other module, at any depth. A layer that another class registers
/// (`conv = register_module("conv", torch::nn::Conv2d(...))`) is kept, and reported with the
/// reason: its parent would still call its own member. Declare such members as brim::nn::Conv2d.
///
///     torch::nn::Sequential model(torch::nn::Conv2d(3, 8, 3), torch::nn::ReLU());
///     std::cout << brim::nn::convert(*model, {.skip = {"1"}, .recompute = true});
///
/// Afterwards `model->at<T>(i)` of a Sequential wants brim's type, or throws;
/// `model[i]->as<torch::nn::Conv2d>()` finds either. Not while another thread runs the model.
///
/// @throws c10::ValueError if a pattern matches no name; what a function of `only` or `skip`
///         throws. Nothing is replaced then.
BRIM_API ConversionReport convert(torch::nn::Module& model, const ConvertOptions& options = {});

/// Undoes convert(): torch::nn's layers in the place of brim's, within the same limits. `kept`
/// lists the layers of brim that are still there.
BRIM_API ConversionReport restore(torch::nn::Module& model);

}  // namespace brim::nn
