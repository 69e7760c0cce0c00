#pragma once

#include <ATen/core/Tensor.h>
#include <brim/export.h>

#include <cstdint>
#include <optional>
#include <string_view>

/// Losses beside those of `torch::nn::functional`, as brim/nn/functional.h has the layers.
namespace brim::nn::functional {

/// Keeps the logits as they came, where torch keeps their log-softmax.
///
/// @param target class numbers (int64), or probabilities
/// @param weight one number per class
/// @param reduction "none", "mean" or "sum"
/// @param in_float32 the same as for `input.to(at::kFloat)`, without such a copy
/// @param recompute keep no logits where a linear layer of brim with `recompute` made them: it runs
///        again in backward
/// @throws c10::ValueError if `reduction` is unknown.
BRIM_API at::Tensor cross_entropy(const at::Tensor& input, const at::Tensor& target,
                                  const std::optional<at::Tensor>& weight = {},
                                  std::int64_t ignore_index = -100,
                                  std::string_view reduction = "mean", double label_smoothing = 0,
                                  bool in_float32 = false, bool recompute = false);

}  // namespace brim::nn::functional
