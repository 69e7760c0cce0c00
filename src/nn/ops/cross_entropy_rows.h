#pragma once

#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>
#include <tuple>

#include "nn/autograd/optional_tensor.h"

// Cross entropy of the rows of a matrix of logits with one class number for each row. Nothing as
// large as the logits is allocated: their log-softmax exists for a few rows at a time or, on CUDA,
// not at all.

namespace brim::nn {

/// @throws c10::ValueError unless it is "none", "mean" or "sum".
[[nodiscard]] std::int64_t reduction_named(std::string_view name);

/// What the logits are worked out in: their own type, or float32 as if they were cast before.
[[nodiscard]] inline at::ScalarType working_type(const at::Tensor& logits, bool in_float32) {
  return in_float32 ? at::kFloat : logits.scalar_type();
}

/// The loss of each row in the working type (0 where the target is `ignore_index`), and the
/// logarithm of each row's sum of exponentials, undefined if there is no kernel that gives it.
/// @throws c10::IndexError on the CPU for a target that is no class.
[[nodiscard]] std::tuple<at::Tensor, at::Tensor> cross_entropy_rows(const at::Tensor& logits,
                                                                    const at::Tensor& target,
                                                                    std::int64_t ignore_index,
                                                                    bool in_float32);

/// The mean or sum of these losses and the number of rows that count, added up in torch's order.
[[nodiscard]] std::tuple<at::Tensor, at::Tensor> reduce_rows(const at::Tensor& losses,
                                                             const at::Tensor& target,
                                                             std::int64_t reduction,
                                                             std::int64_t ignore_index);

/// Writes the gradient of the logits to `result`, which may be `logits`.
/// @param grad of the losses, or of their mean or sum
/// @param log_sums as cross_entropy_rows() gave them; without them they are worked out again. With
///        them the logits may be those of some classes only: a target that is none of these is
///        allowed.
/// @param total the number of rows that count; read for the mean only
void cross_entropy_rows_backward(const at::Tensor& grad, const at::Tensor& logits,
                                 const at::Tensor& target, const MaybeTensor& log_sums,
                                 const MaybeTensor& total, std::int64_t reduction,
                                 std::int64_t ignore_index, bool in_float32, at::Tensor& result);

/// The same by torch's operators, differentiable and in the working type.
[[nodiscard]] at::Tensor cross_entropy_rows_grad(const at::Tensor& grad, const at::Tensor& logits,
                                                 const at::Tensor& target, const MaybeTensor& total,
                                                 std::int64_t reduction, std::int64_t ignore_index,
                                                 at::ScalarType type);

}  // namespace brim::nn
