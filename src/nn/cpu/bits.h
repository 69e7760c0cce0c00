#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

// The loops over bits on the CPU. All tensors are dense; outputs are allocated, with the strides of
// the input.

namespace brim::nn::cpu {

void pack_bits(const at::Tensor& mask, at::Tensor& bits);

void apply_bits(const at::Tensor& input, const at::Tensor& bits, at::Tensor& output, double on,
                double off);

/// `output` may be `input`.
void bitmask_pack(const at::Tensor& input, at::Tensor& output, at::Tensor& bits,
                  std::string_view name, double a, double b);

}  // namespace brim::nn::cpu
