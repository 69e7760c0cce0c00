#pragma once

#include <ATen/core/Tensor.h>
#include <brim/export.h>

#include <functional>
#include <vector>

namespace torch::nn {
class Module;
}

namespace brim::nn {

/// `function(inputs)`, which calls `module`, as a part of the model that runs again in backward if
/// memory was too short to keep what its layers need there; while there is room, it is kept. For
/// modules that were converted with `{.automatic = true}`:
///
///     convert(*model, {.automatic = true});
///     for (auto& layer : layers) {
///       x = run_block(*layer, [&](const auto& in) { return layer->forward(in[0]); }, {x});
///     }
///
/// Values and gradients are the same bit for bit, with the same random numbers and autocast. What
/// torch's own operators keep inside stays; what brim's layers keep goes. Where memory is not
/// short, or a block cannot run again (no gradient is recorded, or it writes to its inputs), this
/// is a plain call.
/// @param module whose parameters and buffers the function reads, and no others
/// @param function called again in the threads of backward; held by the graph
/// @param inputs at least one
/// @throws c10::ValueError without inputs. Backward throws c10::Error if parameters were written to
///         or train() or eval() was called since, and the block must run again.
BRIM_API at::Tensor run_block(torch::nn::Module& module,
                              std::function<at::Tensor(const std::vector<at::Tensor>&)> function,
                              const std::vector<at::Tensor>& inputs);

}  // namespace brim::nn
