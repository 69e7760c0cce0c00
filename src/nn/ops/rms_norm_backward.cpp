#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <vector>

#include "nn/cpu/number.h"
#include "nn/ops/rms_norm.h"

namespace brim::nn {
namespace {

// Elements that one step works on: widened first, then with as many sums side by side, which
// compilers vectorise.
constexpr std::int64_t kBlock = 16;
constexpr std::int64_t kGrain = 32768;  // elements; as much as ATen gives a thread at least

// Rows that are summed by themselves first: thousands of numbers added one by one round too often.
constexpr std::int64_t kRows = 64;

template <class W>
using Block = std::array<W, kBlock>;

template <class T>
Block<Wide<T>> load(const T* from, std::int64_t count) {
  Block<Wide<T>> block{};
  if (count >= kBlock) {
    for (std::size_t i = 0; i < kBlock; ++i) {
      block[i] = static_cast<Wide<T>>(from[i]);
    }
  } else {
    for (std::int64_t i = 0; i < count; ++i) {
      block[static_cast<std::size_t>(i)] = static_cast<Wide<T>>(from[i]);
    }
  }
  return block;
}

/// One row, and its share of the weight's gradient. `weight`, `input_grad` and `weight_grad` may be
/// null.
template <class T>
void backward_row(const T* grad, const T* input, Wide<T> rstd, const Wide<T>* weight, T* input_grad,
                  Wide<T>* weight_grad, std::int64_t size) {
  using W = Wide<T>;
  Block<W> sums{};
  for (std::int64_t at = 0; at < size; at += kBlock) {
    const std::int64_t count = std::min(kBlock, size - at);
    const Block<W> g = load(grad + at, count);
    const Block<W> x = load(input + at, count);
    Block<W> product;
    for (std::size_t i = 0; i < kBlock; ++i) {
      product[i] = g[i] * x[i];
    }
    if (weight_grad != nullptr) {
      for (std::int64_t i = 0; i < count; ++i) {
        weight_grad[at + i] += product[static_cast<std::size_t>(i)] * rstd;
      }
    }
    if (weight != nullptr) {
      const Block<W> w = load(weight + at, count);
      for (std::size_t i = 0; i < kBlock; ++i) {
        product[i] *= w[i];
      }
    }
    for (std::size_t i = 0; i < kBlock; ++i) {
      sums[i] += product[i];
    }
  }
  if (input_grad == nullptr) {
    return;
  }
  W sum = 0;
  for (const W each : sums) {
    sum += each;
  }
  const W along = rstd * rstd * rstd * (sum / static_cast<W>(size));
  for (std::int64_t at = 0; at < size; at += kBlock) {
    const std::int64_t count = std::min(kBlock, size - at);
    Block<W> g = load(grad + at, count);
    const Block<W> x = load(input + at, count);
    if (weight != nullptr) {
      const Block<W> w = load(weight + at, count);
      for (std::size_t i = 0; i < kBlock; ++i) {
        g[i] *= w[i];
      }
    }
    for (std::int64_t i = 0; i < count; ++i) {
      const auto place = static_cast<std::size_t>(i);
      input_grad[at + i] = to<T>(g[place] * rstd - x[place] * along);
    }
  }
}

at::Tensor no_tensor() { return {}; }

std::tuple<at::Tensor, at::Tensor> backward_cpu(const at::Tensor& grad, const at::Tensor& input,
                                                const at::Tensor& rstd, const MaybeTensor& weight,
                                                std::int64_t dims, bool input_grad,
                                                bool weight_grad) {
  const at::Tensor up = grad.contiguous();
  const at::Tensor source = input.contiguous();
  const at::Tensor scale = rstd.contiguous();
  const at::ScalarType wide = scale.scalar_type();
  const at::Tensor factors = is_given(weight) ? weight->to(wide).contiguous() : no_tensor();
  const at::IntArrayRef row = input.sizes().slice(static_cast<std::size_t>(input.dim() - dims));
  const std::int64_t size = c10::multiply_integers(row);
  const std::int64_t rows = scale.numel();
  at::Tensor into_input = input_grad ? at::empty_like(source) : no_tensor();
  // A row of sums a thread: the result does not depend on who comes first.
  const std::int64_t threads = at::get_num_threads();
  at::Tensor into_weight = weight_grad ? at::zeros({threads, size}, scale.options()) : no_tensor();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, source.scalar_type(), "brim::rms_norm_backward", [&] {
        using W = Wide<scalar_t>;
        const auto* const g = up.const_data_ptr<scalar_t>();
        const auto* const x = source.const_data_ptr<scalar_t>();
        const W* const r = scale.const_data_ptr<W>();
        const W* const w = factors.defined() ? factors.const_data_ptr<W>() : nullptr;
        scalar_t* const dx =
            into_input.defined() ? into_input.mutable_data_ptr<scalar_t>() : nullptr;
        W* const dw = into_weight.defined() ? into_weight.mutable_data_ptr<W>() : nullptr;
        const std::int64_t grain =
            std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, size));
        at::parallel_for(0, rows, grain, [&](std::int64_t begin, std::int64_t end) {
          W* const share = dw != nullptr ? dw + at::get_thread_num() * size : nullptr;
          const bool few = share == nullptr || end - begin <= kRows;
          std::vector<W> part(few ? 0 : static_cast<std::size_t>(size));
          for (std::int64_t from = begin; from < end; from += kRows) {
            for (std::int64_t i = from; i < std::min(end, from + kRows); ++i) {
              backward_row(g + i * size, x + i * size, r[i], w,
                           dx != nullptr ? dx + i * size : nullptr, few ? share : part.data(),
                           size);
            }
            for (std::size_t i = 0; i < part.size(); ++i) {
              share[i] += part[i];
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

std::tuple<at::Tensor, at::Tensor> backward_meta(const at::Tensor&, const at::Tensor& input,
                                                 const at::Tensor&, const MaybeTensor& weight,
                                                 std::int64_t, bool input_grad, bool weight_grad) {
  return {input_grad ? at::empty_like(input, {}, at::MemoryFormat::Contiguous) : no_tensor(),
          weight_grad ? at::empty_like(*weight, {}, at::MemoryFormat::Contiguous) : no_tensor()};
}

using BackwardOp = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&,
                                                      const at::Tensor&, const MaybeTensor&,
                                                      std::int64_t, bool, bool);

}  // namespace

c10::DimVector last_dims(std::int64_t dims) {
  c10::DimVector result;
  for (std::int64_t i = 1; i <= dims; ++i) {
    result.push_back(-i);
  }
  return result;
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward_anywhere(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& rstd,
    const MaybeTensor& weight, std::int64_t dims, bool input_grad, bool weight_grad) {
  const at::ScalarType wide = at::toOpMathType(input.scalar_type());
  const at::Tensor up = grad.to(wide);
  const at::Tensor normal = input.to(wide).mul(rstd);
  std::tuple<at::Tensor, at::Tensor> result;
  if (input_grad) {
    const at::Tensor scaled = is_given(weight) ? up.mul(weight->to(wide)) : up;
    const at::Tensor along = scaled.mul(normal).mean(last_dims(dims), true);
    std::get<0>(result) =
        scaled.sub(normal.mul(along)).mul(rstd).to(input.scalar_type()).contiguous();
  }
  if (weight_grad) {
    at::Tensor sum = up.mul(normal);
    c10::DimVector rows;
    for (std::int64_t i = 0; i < input.dim() - dims; ++i) {
      rows.push_back(i);
    }
    if (!rows.empty()) {
      sum = sum.sum(rows);
    }
    std::get<1>(result) = sum.to(weight->scalar_type()).contiguous();
  }
  return result;
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad,
                                                     const at::Tensor& input,
                                                     const at::Tensor& rstd,
                                                     const MaybeTensor& weight, std::int64_t dims,
                                                     bool input_grad, bool weight_grad) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("brim::rms_norm_backward", "")
                             .typed<BackwardOp>();
  return op.call(grad, input, rstd, weight, dims, input_grad, weight_grad);
}

TORCH_LIBRARY_FRAGMENT(brim, m) {
  m.def(
      "rms_norm_backward(Tensor grad, Tensor input, Tensor rstd, Tensor? weight, int dims, bool "
      "input_grad, bool weight_grad) -> (Tensor, Tensor)",
      {at::Tag::needs_fixed_stride_order});
}

TORCH_LIBRARY_IMPL(brim, CPU, m) { m.impl("rms_norm_backward", backward_cpu); }

TORCH_LIBRARY_IMPL(brim, Meta, m) { m.impl("rms_norm_backward", backward_meta); }

TORCH_LIBRARY_IMPL(brim, CompositeExplicitAutograd, m) {
  m.impl("rms_norm_backward", rms_norm_backward_anywhere);
}

}  // namespace brim::nn
