#pragma once

#include <ATen/core/Tensor.h>

#include "nn/ops/bitmask_kind.h"

// The loops over bits on the CPU. All tensors are dense; outputs are allocated, with the strides of
// the input.

namespace brim::nn::cpu {

void pack_bits(const at::Tensor& mask, at::Tensor& bits);

void apply_bits(const at::Tensor& input, const at::Tensor& bits, at::Tensor& output, double on,
                double off);

/// `output` may be `input`.
void bitmask_pack(const at::Tensor& input, at::Tensor& output, at::Tensor& bits, BitmaskKind kind,
                  double a, double b);

}  // namespace brim::nn::cpu
