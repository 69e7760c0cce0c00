#pragma once

#include <ATen/core/Tensor.h>
#include <brim/export.h>
#include <brim/nn/again.h>

#include <functional>
#include <vector>

namespace brim::nn::functional {

/// `function(inputs)`; keeps the inputs, and runs the function again in backward. For cheap
/// elementwise functions that would keep several tensors inside. Values and gradients are those of
/// the function, also under autocast, which is the same when it runs again.
///
///     at::Tensor y = rerun([](const auto& t) { return t[0] * at::sigmoid(t[0] * 1.7); }, {x});
///
/// @param function without random numbers; writes to no input; reads no tensor that needs a
///        gradient and is not an input. Held by the graph; called in the threads of backward.
/// @param inputs at least one
/// @param recompute keep no input that the layer before can recompute
/// @param is_cheap whether later layers may have it run once more to get the value again
/// @throws c10::ValueError without inputs. Backward throws c10::Error if the function reads a
///         tensor that needs a gradient and is not an input.
BRIM_API at::Tensor rerun(std::function<at::Tensor(const std::vector<at::Tensor>&)> function,
                          const std::vector<at::Tensor>& inputs, Again recompute = false,
                          bool is_cheap = true);

}  // namespace brim::nn::functional
