#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace brim::nn {

/// torch's scaled_dot_product_attention, run again in backward where torch has no fused kernel: a
/// fused one keeps little; without, as with dropout on a CPU, torch keeps the weights of each query
/// and key several times over. Not where these are fewer than the query's own numbers.
/// @returns nothing where torch's own should run
[[nodiscard]] std::optional<at::Tensor> attention_again(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& mask, double dropout_p, bool is_causal,
    std::optional<double> scale, bool enable_gqa);

}  // namespace brim::nn
