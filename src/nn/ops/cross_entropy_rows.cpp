#include "nn/ops/cross_entropy_rows.h"

#include <ATen/Parallel.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/_log_softmax_backward_data.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/nll_loss_backward.h>
#include <ATen/ops/nll_loss_forward.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "nn/autograd/operator.h"

namespace brim::nn {
namespace {

using TwoTensors = std::tuple<at::Tensor, at::Tensor>;

/// Calls run(first row, rows) for parts of the matrix, whose log-softmax takes a small share of the
/// memory that torch takes for that of all. Parts below `least` bytes would take longer to start
/// than to run, and parts above `most` leave the caches.
template <class Run>
void for_each_part(const at::Tensor& logits, at::ScalarType type, const Run& run) {
  constexpr std::int64_t kParts = 8;
  const std::int64_t least = logits.is_cpu() ? 128 << 10 : 4 << 20;
  const std::int64_t most = logits.is_cpu() ? 8 << 20 : 256 << 20;
  const std::int64_t row = logits.size(1) * static_cast<std::int64_t>(c10::elementSize(type));
  const std::int64_t bytes = std::clamp(logits.size(0) * row / kParts, least, most);
  const std::int64_t rows = std::max<std::int64_t>(at::get_num_threads(), bytes / row);
  for (std::int64_t first = 0; first < logits.size(0); first += rows) {
    run(first, std::min(rows, logits.size(0) - first));
  }
}

TwoTensors rows_anywhere(const at::Tensor& logits, const at::Tensor& target,
                         std::int64_t ignore_index, bool in_float32) {
  const at::ScalarType type = working_type(logits, in_float32);
  at::Tensor losses = at::empty({logits.size(0)}, logits.options().dtype(type));
  for_each_part(logits, type, [&](std::int64_t first, std::int64_t rows) {
    const at::Tensor part = at::log_softmax(logits.narrow(0, first, rows), 1, type);
    losses.narrow(0, first, rows)
        .copy_(std::get<0>(at::nll_loss_forward(part, target.narrow(0, first, rows), {},
                                                at::Reduction::None, ignore_index)));
  });
  return {std::move(losses), at::Tensor()};
}

TwoTensors rows_meta(const at::Tensor& logits, const at::Tensor& /*target*/,
                     std::int64_t /*ignore_index*/, bool in_float32) {
  return {at::empty_symint({logits.sym_size(0)},
                           logits.options().dtype(working_type(logits, in_float32))),
          at::Tensor()};
}

const Operator<rows_anywhere> kRows(
    "cross_entropy_rows(Tensor logits, Tensor target, int ignore_index, bool in_float32) -> "
    "(Tensor, Tensor)",
    {.meta = rows_meta});

/// The exponentials minus what the target has, each row times its gradient; in a wide type.
at::Tensor part_grad(const at::Tensor& grads, const at::Tensor& logits, const at::Tensor& target,
                     const at::Tensor& log_sums) {
  const std::int64_t classes = logits.size(1);
  const at::Tensor is_here = target.ge(0).logical_and_(target.lt(classes));
  const at::Tensor result =
      logits.to(log_sums.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  result.sub_(log_sums.unsqueeze(1)).exp_().mul_(grads.unsqueeze(1));
  return result.scatter_add_(1, target.clamp(0, classes - 1).unsqueeze(1),
                             grads.neg().mul_(is_here).unsqueeze(1));
}

/// cross_entropy_rows_grad() into `result`, for logits on the CPU. There torch's kernels may write
/// to what they read, row by row: beside the result one or two tensors of its size exist, not
/// three.
void rows_grad_cpu(const at::Tensor& grad, const at::Tensor& logits, const at::Tensor& target,
                   const MaybeTensor& total, std::int64_t reduction, std::int64_t ignore_index,
                   at::ScalarType type, at::Tensor result) {
  const bool in_result = type == logits.scalar_type() && !result.is_alias_of(logits);
  const at::Tensor log_softmax =
      in_result ? at::_log_softmax_out(result, logits, 1, false) : at::log_softmax(logits, 1, type);
  const at::Tensor divisor = total ? *total : at::zeros({}, log_softmax.options());
  at::Tensor of_rows =
      at::nll_loss_backward(grad, log_softmax, target, {}, reduction, ignore_index, divisor);
  at::_log_softmax_backward_data_out(in_result ? result : of_rows, of_rows, log_softmax, 1, type);
  if (!in_result) {
    result.copy_(of_rows);
  }
}

void rows_backward_anywhere(const at::Tensor& grad, const at::Tensor& logits,
                            const at::Tensor& target, const MaybeTensor& log_sums,
                            const MaybeTensor& total, std::int64_t reduction,
                            std::int64_t ignore_index, bool in_float32, at::Tensor& result) {
  const at::ScalarType type = working_type(logits, in_float32);
  for_each_part(logits, type, [&](std::int64_t first, std::int64_t rows) {
    if (log_sums) {
      result.narrow(0, first, rows)
          .copy_(part_grad(grad.narrow(0, first, rows), logits.narrow(0, first, rows),
                           target.narrow(0, first, rows), log_sums->narrow(0, first, rows)));
      return;
    }
    const bool is_reduced = reduction != at::Reduction::None;
    const at::Tensor up = is_reduced ? grad : grad.narrow(0, first, rows);
    const at::Tensor part = logits.narrow(0, first, rows);
    const at::Tensor classes = target.narrow(0, first, rows);
    const at::Tensor into = result.narrow(0, first, rows);
    if (logits.is_cpu()) {
      rows_grad_cpu(up, part, classes, total, reduction, ignore_index, type, into);
    } else {
      into.copy_(cross_entropy_rows_grad(up, part, classes, total, reduction, ignore_index, type));
    }
  });
}

void rows_backward_meta(const at::Tensor& /*grad*/, const at::Tensor& /*logits*/,
                        const at::Tensor& /*target*/, const MaybeTensor& /*log_sums*/,
                        const MaybeTensor& /*total*/, std::int64_t /*reduction*/,
                        std::int64_t /*ignore_index*/, bool /*in_float32*/,
                        at::Tensor& /*result*/) {}

const Operator<rows_backward_anywhere> kRowsBackward(
    "cross_entropy_rows_backward(Tensor grad, Tensor logits, Tensor target, Tensor? log_sums, "
    "Tensor? total, int reduction, int ignore_index, bool in_float32, Tensor(a!) result) -> ()",
    {.meta = rows_backward_meta});

}  // namespace

std::int64_t reduction_named(std::string_view name) {
  if (name == "mean") {
    return at::Reduction::Mean;
  }
  TORCH_CHECK_VALUE(name == "sum" || name == "none",
                    "reduction must be \"none\", \"mean\" or \"sum\", got \"", name, "\"");
  return name == "sum" ? at::Reduction::Sum : at::Reduction::None;
}

TwoTensors cross_entropy_rows(const at::Tensor& logits, const at::Tensor& target,
                              std::int64_t ignore_index, bool in_float32) {
  return kRows(logits, target, ignore_index, in_float32);
}

TwoTensors reduce_rows(const at::Tensor& losses, const at::Tensor& target, std::int64_t reduction,
                       std::int64_t ignore_index) {
  constexpr std::int64_t kIgnored = -100;
  const at::Tensor classes = target.eq(ignore_index).to(at::kLong).mul_(kIgnored);
  return at::nll_loss_forward(losses.neg().unsqueeze(1), classes, {}, reduction, kIgnored);
}

void cross_entropy_rows_backward(const at::Tensor& grad, const at::Tensor& logits,
                                 const at::Tensor& target, const MaybeTensor& log_sums,
                                 const MaybeTensor& total, std::int64_t reduction,
                                 std::int64_t ignore_index, bool in_float32, at::Tensor& result) {
  kRowsBackward(grad, logits, target, log_sums, total, reduction, ignore_index, in_float32, result);
}

at::Tensor cross_entropy_rows_grad(const at::Tensor& grad, const at::Tensor& logits,
                                   const at::Tensor& target, const MaybeTensor& total,
                                   std::int64_t reduction, std::int64_t ignore_index,
                                   at::ScalarType type) {
  const at::Tensor log_softmax = at::log_softmax(logits, 1, type);
  const at::Tensor divisor = total ? *total : at::zeros({}, log_softmax.options());
  return at::_log_softmax_backward_data(
      at::nll_loss_backward(grad, log_softmax, target, {}, reduction, ignore_index, divisor),
      log_softmax, 1, type);
}

}  // namespace brim::nn
