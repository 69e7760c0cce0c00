#include "nn/cuda/cross_entropy.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "nn/cuda/tensors.h"
#include "nn/ops/cross_entropy_rows.h"

// The operators of ops/cross_entropy_rows.cpp on CUDA.

namespace brim::nn::cuda {
namespace {

/// The matrix with elements side by side; rows may lie apart.
at::Tensor in_rows(const at::Tensor& logits) {
  return logits.stride(1) == 1 ? logits : logits.contiguous();
}

/// @param rows, target must outlive the result
Logits logits_of(const at::Tensor& rows, const at::Tensor& target, std::int64_t ignore_index,
                 bool in_float32) {
  const Number type = number_of(rows, "brim::cross_entropy");
  return {type,
          in_float32 ? Number::float32 : type,
          rows.const_data_ptr(),
          rows.size(0),
          rows.size(1),
          rows.stride(0),
          target.const_data_ptr<std::int64_t>(),
          ignore_index};
}

at::Tensor new_log_sums(const at::Tensor& rows) {
  const bool is_double = rows.scalar_type() == at::kDouble;
  return at::empty({rows.size(0)}, rows.options().dtype(is_double ? at::kDouble : at::kFloat));
}

std::tuple<at::Tensor, at::Tensor> rows_op(const at::Tensor& logits, const at::Tensor& target,
                                           std::int64_t ignore_index, bool in_float32) {
  const at::Tensor rows = in_rows(logits);
  const at::Tensor classes = target.contiguous();
  at::Tensor losses =
      at::empty({rows.size(0)}, rows.options().dtype(working_type(logits, in_float32)));
  at::Tensor log_sums = new_log_sums(rows);
  launch_on(rows, [&](cudaStream_t stream) {
    cross_entropy_rows(logits_of(rows, classes, ignore_index, in_float32),
                       losses.mutable_data_ptr(), log_sums.mutable_data_ptr(), stream);
  });
  return {losses, log_sums};
}

void rows_backward_op(const at::Tensor& grad, const at::Tensor& logits, const at::Tensor& target,
                      const MaybeTensor& log_sums, const MaybeTensor& total, std::int64_t reduction,
                      std::int64_t ignore_index, bool in_float32, at::Tensor& result) {
  const at::Tensor rows = in_rows(logits);
  const at::Tensor classes = target.contiguous();
  const at::Tensor grads = grad.contiguous();
  const Logits all = logits_of(rows, classes, ignore_index, in_float32);
  at::Tensor sums = log_sums ? *log_sums : new_log_sums(rows);
  const bool is_mean = reduction == at::Reduction::Mean;
  launch_on(rows, [&](cudaStream_t stream) {
    if (!log_sums) {
      cross_entropy_rows(all, nullptr, sums.mutable_data_ptr(), stream);
    }
    cross_entropy_rows_backward(
        all, sums.const_data_ptr(), grads.const_data_ptr(), reduction != at::Reduction::None,
        is_mean ? total->const_data_ptr() : nullptr, result.mutable_data_ptr(), stream);
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(brim, CUDA, m) {
  m.impl("cross_entropy_rows", rows_op);
  m.impl("cross_entropy_rows_backward", rows_backward_op);
}

}  // namespace brim::nn::cuda
