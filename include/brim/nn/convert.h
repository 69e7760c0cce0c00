#pragma once

#include <brim/export.h>

#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace brim::nn {

/// What became of one layer.
struct ConvertedLayer {
  std::string name;    // dotted, as in named_modules()
  std::string type;    // what it was, such as "torch::nn::Conv2d"
  std::string reason;  // why it was kept; empty where it was replaced
};

/// What convert() or restore() did. A layer that two parents share is listed under each name.
struct ConversionReport {
  std::vector<ConvertedLayer> replaced;
  std::vector<ConvertedLayer> kept;
};

/// One line a layer: name, type, and why it was kept.
BRIM_API std::ostream& operator<<(std::ostream& stream, const ConversionReport& report);

struct ConvertOptions {
  /// Says whether to replace the layer of this name; empty means all.
  std::function<bool(const std::string& name, const torch::nn::Module& layer)> choose;
  /// Sets `recompute` of the convolutions, linear layers and activations.
  bool recompute = false;
};

/// Puts brim's layers in the place of torch::nn's, in place, by exact type. Parameters, buffers,
/// requires_grad, training flag, names and order stay: a new layer shares the tensors of the old
/// one, so that an optimizer made before goes on. A layer that is in several places stays one
/// layer.
///
/// C++ has no way to change what a member points to, so only what a container holds is replaced:
/// the elements of torch::nn::Sequential, ModuleList and ModuleDict, of classes derived from those,
/// and of containers inside any other module, at any depth. A layer that another class registers
/// (`conv = register_module("conv", torch::nn::Conv2d(...))`) is kept, and reported with the
/// reason: its parent goes on calling its own member. Declare such members as brim::nn::Conv2d
/// instead.
///
///     torch::nn::Sequential model(torch::nn::Conv2d(3, 8, 3), torch::nn::ReLU());
///     std::cout << brim::nn::convert(*model);
///
/// After it, `model->at<T>(i)` of a Sequential wants brim's type, or throws;
/// `model[i]->as<torch::nn::Conv2d>()` finds either. Not while another thread runs the
/// model.
///
/// @throws what `choose` throws; layers that were visited before stay replaced.
BRIM_API ConversionReport convert(torch::nn::Module& model, const ConvertOptions& options = {});

/// Undoes convert(): torch::nn's layers in the place of brim's, within the same limits. `kept`
/// lists the layers of brim that are still there.
BRIM_API ConversionReport restore(torch::nn::Module& model);

}  // namespace brim::nn
