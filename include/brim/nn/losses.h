#pragma once

#include <ATen/core/Tensor.h>
#include <brim/export.h>
#include <brim/nn/again.h>

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
                                  bool in_float32 = false, Again recompute = false);

/// Options of linear_cross_entropy.
struct LinearCrossEntropyOptions {
  std::optional<at::Tensor> weight = std::nullopt;  ///< one number per class
  std::int64_t ignore_index = -100;                 ///< a target that does not count
  std::string_view reduction = "mean";              ///< or "none" or "sum"
  double label_smoothing = 0;
  double scale = 1;         ///< of the logits
  double softcap = 0;       ///< logits become softcap * tanh(logits / softcap); 0: they stay
  bool in_float32 = false;  ///< the loss is that of the logits as float32
  std::int64_t chunk = 0;   ///< rows whose logits may exist at once; 0: as free memory allows
};

/// `cross_entropy(linear(input, linear_weight, linear_bias), target)` without all the logits: they
/// are worked out in parts, again in backward, and none are kept. The parts are as large as a
/// quarter of the memory that is free (see memory_stats), or as `chunk` says.
///
/// One part gives the gradients of the plain form. With several, the input's gradient is a sum over
/// the parts, each rounded to its type and added in float32.
/// @param input [rows, features]
/// @param linear_weight [classes, features]
/// @param target class numbers (int64) [rows]. Other shapes and probabilities: the plain form.
/// @throws c10::ValueError if an option is out of range.
BRIM_API at::Tensor linear_cross_entropy(const at::Tensor& input, const at::Tensor& linear_weight,
                                         const at::Tensor& target,
                                         const std::optional<at::Tensor>& linear_bias = {},
                                         const LinearCrossEntropyOptions& options = {});

}  // namespace brim::nn::functional
