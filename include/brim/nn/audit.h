#pragma once

#include <ATen/core/Tensor.h>
#include <brim/export.h>

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace brim::nn {

/// Bytes that one layer keeps for backward.
struct LayerAudit {
  std::string name;           // dotted, as in named_modules(); "(other)" outside of any such layer
  std::string type;           // such as "torch::nn::Conv2d"
  std::int64_t torch_nn = 0;  // kept by torch::nn's layer
  std::int64_t brim = 0;      // kept by brim's
};

/// What a model keeps for backward: the layers that ran, in the order of their first call.
struct BRIM_API Audit {
  std::vector<LayerAudit> layers;

  /// Sums over the layers, in bytes.
  [[nodiscard]] std::int64_t torch_nn() const;
  [[nodiscard]] std::int64_t brim() const;
};

/// A table with a row per layer, and the sums.
BRIM_API std::ostream& operator<<(std::ostream& stream, const Audit& audit);

/// Measures what a model keeps for backward, layer by layer, with torch::nn's layers and with
/// brim's: what convert() would save.
///
///     std::cout << brim::nn::audit(*model, [&] { return model->forward(images); });
///
/// Calls `forward` twice, with gradients enabled, and counts the memory that it allocates and that
/// is still held when it returns. A tensor counts for the layer that keeps it first. Parameters,
/// buffers and inputs do not count: they exist anyway. Nor does the result, unless a layer keeps
/// it. On an accelerator, sizes are those of the allocator's blocks.
///
/// Every layer that convert() can reach, in containers, has a row; the rest of the model is one
/// row, "(other)". What needs a gradient is what needs one now, so freeze first. Afterwards layers
/// and buffers are as before; random numbers were drawn twice. Not while another thread runs the
/// model.
///
/// @throws c10::Error inside of a torch profiler; what `forward` throws, with the model as before.
BRIM_API Audit audit(torch::nn::Module& model, const std::function<at::Tensor()>& forward);

}  // namespace brim::nn
