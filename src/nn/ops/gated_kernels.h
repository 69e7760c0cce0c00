#pragma once

#include <array>
#include <optional>

#include "nn/autograd/optional_tensor.h"
#include "nn/ops/elementwise.h"

// Activations in one pass over memory, where the device has a kernel (CUDA) and the tensors suit it
// (one type, rows without gaps). Else nothing is returned, and ATen operators do the work. The bits
// are those of ATen's. Never inside of autograd's recording.

namespace brim::nn {

/// The type of act(input), under the autocast that is in force.
[[nodiscard]] at::ScalarType value_type(const Elementwise& activation, const at::Tensor& input);

/// act(gate) * up.
[[nodiscard]] std::optional<at::Tensor> fused_gated(const Elementwise& activation,
                                                    const at::Tensor& gate, const at::Tensor& up);

/// The gradients of gate and up. @param wanted which of them
[[nodiscard]] std::optional<std::array<at::Tensor, 2>> fused_gated_grads(
    const Elementwise& activation, const at::Tensor& grad, const at::Tensor& gate,
    const at::Tensor& up, std::array<bool, 2> wanted);

/// The same into given tensors. @returns whether it did
[[nodiscard]] bool fused_gated_grads_into(const Elementwise& activation, const at::Tensor& grad,
                                          const at::Tensor& gate, const at::Tensor& up,
                                          const at::Tensor& grad_gate, const at::Tensor& grad_up);

/// act(input), for those that are several operators of ATen's.
[[nodiscard]] std::optional<at::Tensor> fused_activation(const Elementwise& activation,
                                                         const at::Tensor& input);

/// @param grad has the type of the output
[[nodiscard]] std::optional<at::Tensor> fused_activation_grad(const Elementwise& activation,
                                                              const at::Tensor& grad,
                                                              const at::Tensor& input);

}  // namespace brim::nn
