#include "nn/cpu/rms_norm.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <vector>

#include "nn/cpu/grain.h"
#include "nn/cpu/number.h"

namespace brim::nn::cpu {
namespace {

// Rows that are summed by themselves first: thousands of numbers added one by one round too often.
constexpr std::int64_t kRows = 64;

/// The sum of a[i] * b[i]: as many sums side by side as compilers vectorise.
template <class W>
W dot(const std::vector<W>& a, const std::vector<W>& b) {
  constexpr std::size_t kSums = 16;
  std::array<W, kSums> sums{};
  std::size_t i = 0;
  for (; i + kSums <= a.size(); i += kSums) {
    for (std::size_t k = 0; k < kSums; ++k) {
      sums[k] += a[i + k] * b[i + k];
    }
  }
  W sum = 0;
  for (; i < a.size(); ++i) {
    sum += a[i] * b[i];
  }
  for (const W each : sums) {
    sum += each;
  }
  return sum;
}

/// Works on rows one after the other. `weight` may be null.
template <class T>
class RowBackward {
 public:
  using W = Wide<T>;

  RowBackward(const W* weight, std::int64_t size)
      : weight_(weight), grad_(static_cast<std::size_t>(size)), input_(grad_.size()) {}

  /// @param input_grad, weight_grad may be null; to the second the row's share is added
  void run(const T* grad, const T* input, W rstd, T* input_grad, W* weight_grad) {
    const std::size_t size = grad_.size();
    for (std::size_t i = 0; i < size; ++i) {
      grad_[i] = static_cast<W>(grad[i]);
      input_[i] = static_cast<W>(input[i]);
    }
    if (weight_grad != nullptr) {
      for (std::size_t i = 0; i < size; ++i) {
        weight_grad[i] += grad_[i] * input_[i] * rstd;
      }
    }
    if (input_grad == nullptr) {
      return;
    }
    if (weight_ != nullptr) {
      for (std::size_t i = 0; i < size; ++i) {
        grad_[i] *= weight_[i];
      }
    }
    const W along = rstd * rstd * rstd * (dot(grad_, input_) / static_cast<W>(size));
    for (std::size_t i = 0; i < size; ++i) {
      input_grad[i] = to<T>(grad_[i] * rstd - input_[i] * along);
    }
  }

 private:
  const W* weight_;
  std::vector<W> grad_;  // of one row, widened
  std::vector<W> input_;
};

}  // namespace

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad,
                                                     const at::Tensor& input,
                                                     const at::Tensor& rstd,
                                                     const MaybeTensor& weight, std::int64_t dims,
                                                     bool input_grad, bool weight_grad) {
  const at::Tensor up = grad.contiguous();
  const at::Tensor source = input.contiguous();
  const at::Tensor scale = rstd.contiguous();
  const at::Tensor factors =
      is_given(weight) ? weight->to(scale.scalar_type()).contiguous() : at::Tensor();
  const at::IntArrayRef row = input.sizes().slice(static_cast<std::size_t>(input.dim() - dims));
  const std::int64_t size = c10::multiply_integers(row);
  at::Tensor into_input = input_grad ? at::empty_like(source) : at::Tensor();
  // A row of sums per thread: the result does not depend on who comes first.
  at::Tensor into_weight =
      weight_grad ? at::zeros({at::get_num_threads(), size}, scale.options()) : at::Tensor();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, source.scalar_type(), "brim::rms_norm_backward", [&] {
        using W = Wide<scalar_t>;
        const auto* const g = up.const_data_ptr<scalar_t>();
        const auto* const x = source.const_data_ptr<scalar_t>();
        const W* const r = scale.const_data_ptr<W>();
        const W* const w = factors.defined() ? factors.const_data_ptr<W>() : nullptr;
        auto* const dx = input_grad ? into_input.mutable_data_ptr<scalar_t>() : nullptr;
        auto* const dw = weight_grad ? into_weight.mutable_data_ptr<W>() : nullptr;
        at::parallel_for(
            0, scale.numel(), grain_of(size), [&](std::int64_t begin, std::int64_t end) {
              RowBackward<scalar_t> rows(w, size);
              std::vector<W> part(dw != nullptr ? static_cast<std::size_t>(size) : 0);
              for (std::int64_t from = begin; from < end; from += kRows) {
                for (std::int64_t i = from; i < std::min(end, from + kRows); ++i) {
                  rows.run(g + i * size, x + i * size, r[i],
                           dx != nullptr ? dx + i * size : nullptr,
                           dw != nullptr ? part.data() : nullptr);
                }
                for (std::size_t i = 0; i < part.size(); ++i) {
                  dw[at::get_thread_num() * size + static_cast<std::int64_t>(i)] += part[i];
                  part[i] = 0;
                }
              }
            });
      });
  if (weight_grad) {
    into_weight = into_weight.sum(0).view(row).to(weight->scalar_type());
  }
  return {std::move(into_input), std::move(into_weight)};
}

}  // namespace brim::nn::cpu
