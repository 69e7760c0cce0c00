#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <tuple>

#include "nn/ops/bitmask_activation_kind.h"

// Activations whose derivative has two values: one bit an element says which.

namespace brim::nn {

/// The activation's value, and a bit an element: set where the gradient passes whole.
std::tuple<at::Tensor, at::Tensor> gate_pack(const at::Tensor& input, std::int64_t gate, double a,
                                             double b);

/// The same in place; gives the bits. `input` is dense and does not overlap itself.
at::Tensor gate_pack_(at::Tensor& input, std::int64_t gate, double a, double b);

}  // namespace brim::nn
