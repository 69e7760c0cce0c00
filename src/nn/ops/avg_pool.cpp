#include <ATen/ops/_adaptive_avg_pool2d_backward.h>
#include <ATen/ops/_adaptive_avg_pool3d_backward.h>
#include <ATen/ops/adaptive_avg_pool1d.h>
#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/adaptive_avg_pool3d.h>
#include <ATen/ops/avg_pool1d.h>
#include <ATen/ops/avg_pool2d.h>
#include <ATen/ops/avg_pool2d_backward.h>
#include <ATen/ops/avg_pool3d.h>
#include <ATen/ops/avg_pool3d_backward.h>
#include <brim/nn/functional.h>

#include <algorithm>

#include "nn/autograd/linear_history.h"
#include "nn/autograd/operator.h"
#include "nn/ops/avg_pool_kernels.h"

namespace brim::nn {
namespace {

using at::IntArrayRef;
using c10::SymIntArrayRef;
using Divisor = std::optional<std::int64_t>;

/// Whether brim's kernel does it on the CPU. torch's is faster for more, but starts threads also
/// for the smallest tensors, which takes longer than the work.
bool are_few(SymIntArrayRef input_sizes) {
  constexpr std::int64_t kFew = 2048;
  return c10::multiply_integers(C10_AS_INTARRAYREF_SLOW(input_sizes)) <= kFew;
}

/// torch's backward takes the input for its shape alone: this one has no memory of its own.
/// One-dimensional samples are images of one row, as in torch.
at::Tensor shape_only(SymIntArrayRef input_sizes, std::int64_t dims, bool channels_last,
                      const at::Tensor& grad) {
  c10::DimVector sizes(C10_AS_INTARRAYREF_SLOW(input_sizes));
  if (dims == 1) {
    sizes.insert(sizes.end() - 1, 1);
  }
  at::Tensor input = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(grad.storage()),
                                                              grad.key_set(), grad.dtype());
  input.unsafeGetTensorImpl()->set_sizes_and_strides(
      sizes, dense_strides(IntArrayRef(sizes), channels_last));
  return input;
}

/// Whether torch's gradient of `input` is in the order channels last; of three dimensions never.
bool is_grad_channels_last(const at::Tensor& input, std::size_t dims) {
  return dims < 3 && is_channels_last(input, dims);
}

// -- Windows of one size -----------------------------------------------------------------------

at::Tensor torch_avg_pool(const at::Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                          IntArrayRef padding, bool ceil_mode, bool count_include_pad,
                          Divisor divisor) {
  check_dims("kernel_size", kernel_size);
  if (kernel_size.size() == 1) {
    TORCH_CHECK_VALUE(!divisor, "divisor_override is for two and three dimensions, got ", *divisor,
                      " with kernel_size ", kernel_size);
    return at::avg_pool1d(input, kernel_size, stride, padding, ceil_mode, count_include_pad);
  }
  auto* const pool = kernel_size.size() == 2 ? &at::avg_pool2d : &at::avg_pool3d;
  return pool(input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor);
}

at::Tensor avg_backward_anywhere(const at::Tensor& grad, SymIntArrayRef input_sizes,
                                 IntArrayRef numbers, bool ceil_mode, bool count_include_pad,
                                 Divisor divisor, bool channels_last) {
  const PoolWindow window(numbers);
  const auto dims = static_cast<std::int64_t>(window.dims());
  const at::Tensor input = shape_only(input_sizes, dims, channels_last, grad);
  if (dims == 1) {
    return at::avg_pool2d_backward(grad.unsqueeze(-2), input, {1, window.kernel_size()[0]},
                                   {1, window.stride()[0]}, {0, window.padding()[0]}, ceil_mode,
                                   count_include_pad, divisor)
        .squeeze(-2);
  }
  auto* const backward = dims == 2 ? &at::avg_pool2d_backward : &at::avg_pool3d_backward;
  return backward(grad, input, window.kernel_size(), window.stride(), window.padding(), ceil_mode,
                  count_include_pad, divisor);
}

at::Tensor avg_backward_cpu(const at::Tensor& grad, SymIntArrayRef input_sizes, IntArrayRef numbers,
                            bool ceil_mode, bool count_include_pad, Divisor divisor,
                            bool channels_last) {
  auto* const run =
      are_few(input_sizes) ? avg_pool_backward_with<cpu::avg_pool_backward> : avg_backward_anywhere;
  return run(grad, input_sizes, numbers, ceil_mode, count_include_pad, divisor, channels_last);
}

at::Tensor avg_backward_meta(const at::Tensor& grad, SymIntArrayRef input_sizes, IntArrayRef, bool,
                             bool, Divisor, bool channels_last) {
  return empty_in_order(input_sizes, channels_last, grad.options());
}

at::Tensor avg_backward_autograd(const at::Tensor& grad, SymIntArrayRef input_sizes,
                                 IntArrayRef numbers, bool ceil_mode, bool count_include_pad,
                                 Divisor divisor, bool channels_last);

const Operator<avg_backward_anywhere> kAvgBackward(
    "avg_pool_backward(Tensor grad, SymInt[] input_sizes, int[] window, bool ceil_mode, "
    "bool count_include_pad, int? divisor_override, bool channels_last) -> Tensor",
    {.cpu = avg_backward_cpu, .meta = avg_backward_meta, .autograd = avg_backward_autograd},
    {at::Tag::needs_fixed_stride_order});

at::Tensor avg_pool_autograd(const at::Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                             IntArrayRef padding, bool ceil_mode, bool count_include_pad,
                             Divisor divisor) {
  at::Tensor output = below_autograd([&] {
    return torch_avg_pool(input, kernel_size, stride, padding, ceil_mode, count_include_pad,
                          divisor);
  });
  if (needs_grad(input)) {
    const std::size_t dims = kernel_size.size();
    const PoolWindow window(kernel_size, expand_option("stride", stride, dims, kernel_size),
                            expand_option("padding", padding, dims, {0}), c10::DimVector(dims, 1));
    const bool channels_last = is_grad_channels_last(input, dims);
    set_linear_history(output, input, "brim::avg_pool_backward", true,
                       [=, sizes = c10::SymDimVector(input.sym_sizes())](const at::Tensor& grad) {
                         return kAvgBackward(grad, sizes, window.numbers(), ceil_mode,
                                             count_include_pad, divisor, channels_last);
                       });
  }
  return output;
}

const LayerOperator<avg_pool_autograd, torch_avg_pool, CastTo::float32_in_3d> kAvgPool(
    "avg_pool(Tensor input, int[] kernel_size, int[] stride, int[] padding, bool ceil_mode, "
    "bool count_include_pad, int? divisor_override) -> Tensor",
    {kInGraphs});

at::Tensor avg_backward_autograd(const at::Tensor& grad, SymIntArrayRef input_sizes,
                                 IntArrayRef numbers, bool ceil_mode, bool count_include_pad,
                                 Divisor divisor, bool channels_last) {
  refuse_forward_ad("avg_pool", grad);
  at::Tensor grad_input = below_autograd([&] {
    return kAvgBackward(grad, input_sizes, numbers, ceil_mode, count_include_pad, divisor,
                        channels_last);
  });
  if (needs_grad(grad)) {
    set_linear_history(grad_input, grad, "brim::avg_pool_double_backward", false,
                       [=, window = PoolWindow(numbers)](const at::Tensor& up) {
                         return kAvgPool(up, window.kernel_size(), window.stride(),
                                         window.padding(), ceil_mode, count_include_pad, divisor);
                       });
  }
  return grad_input;
}

// -- Windows that follow from the sizes ----------------------------------------------------------

at::Tensor torch_adaptive_avg_pool(const at::Tensor& input, IntArrayRef output_size) {
  check_dims("output_size", output_size);
  switch (output_size.size()) {
    case 1:
      return at::adaptive_avg_pool1d(input, output_size);
    case 2:
      return at::adaptive_avg_pool2d(input, output_size);
    default:
      return at::adaptive_avg_pool3d(input, output_size);
  }
}

/// @param dims how many of the last dimensions are pooled
at::Tensor adaptive_backward_anywhere(const at::Tensor& grad, SymIntArrayRef input_sizes,
                                      std::int64_t dims, bool channels_last) {
  const at::Tensor input = shape_only(input_sizes, dims, channels_last, grad);
  switch (dims) {
    case 1:
      return at::_adaptive_avg_pool2d_backward(grad.unsqueeze(-2), input).squeeze(-2);
    case 2:
      return at::_adaptive_avg_pool2d_backward(grad, input);
    default:
      return at::_adaptive_avg_pool3d_backward(grad, input);
  }
}

at::Tensor adaptive_backward_cpu(const at::Tensor& grad, SymIntArrayRef input_sizes,
                                 std::int64_t dims, bool channels_last) {
  auto* const run = are_few(input_sizes) ? adaptive_backward_with<cpu::avg_pool_backward>
                                         : adaptive_backward_anywhere;
  return run(grad, input_sizes, dims, channels_last);
}

at::Tensor adaptive_backward_meta(const at::Tensor& grad, SymIntArrayRef input_sizes, std::int64_t,
                                  bool channels_last) {
  return empty_in_order(input_sizes, channels_last, grad.options());
}

at::Tensor adaptive_backward_autograd(const at::Tensor& grad, SymIntArrayRef input_sizes,
                                      std::int64_t dims, bool channels_last);

const Operator<adaptive_backward_anywhere> kAdaptiveBackward(
    "adaptive_avg_pool_backward(Tensor grad, SymInt[] input_sizes, int dims, "
    "bool channels_last) -> Tensor",
    {.cpu = adaptive_backward_cpu,
     .meta = adaptive_backward_meta,
     .autograd = adaptive_backward_autograd},
    {at::Tag::needs_fixed_stride_order});

at::Tensor adaptive_backward_autograd(const at::Tensor& grad, SymIntArrayRef input_sizes,
                                      std::int64_t dims, bool channels_last) {
  refuse_forward_ad("adaptive_avg_pool", grad);
  at::Tensor grad_input =
      below_autograd([&] { return kAdaptiveBackward(grad, input_sizes, dims, channels_last); });
  if (needs_grad(grad)) {
    const IntArrayRef pooled = grad.sizes().slice(static_cast<std::size_t>(grad.dim() - dims));
    set_linear_history(grad_input, grad, "brim::adaptive_avg_pool_double_backward", false,
                       [output_size = c10::DimVector(pooled)](const at::Tensor& up) {
                         return functional::adaptive_avg_pool(up, output_size);
                       });
  }
  return grad_input;
}

at::Tensor adaptive_avg_pool_autograd(const at::Tensor& input, IntArrayRef output_size) {
  // To one value torch takes the mean, whose backward keeps nothing.
  const auto is_one = [](std::int64_t size) { return size == 1; };
  if (needs_grad(input) && std::all_of(output_size.begin(), output_size.end(), is_one)) {
    return torch_adaptive_avg_pool(input, output_size);
  }
  at::Tensor output = below_autograd([&] { return torch_adaptive_avg_pool(input, output_size); });
  if (needs_grad(input)) {
    const auto dims = static_cast<std::int64_t>(output_size.size());
    const bool channels_last = is_grad_channels_last(input, output_size.size());
    set_linear_history(output, input, "brim::adaptive_avg_pool_backward", true,
                       [=, sizes = c10::SymDimVector(input.sym_sizes())](const at::Tensor& grad) {
                         return kAdaptiveBackward(grad, sizes, dims, channels_last);
                       });
  }
  return output;
}

const LayerOperator<adaptive_avg_pool_autograd, torch_adaptive_avg_pool, CastTo::float32_in_3d>
    kAdaptiveAvgPool("adaptive_avg_pool(Tensor input, int[] output_size) -> Tensor");

}  // namespace

at::Tensor functional::avg_pool(const at::Tensor& input, at::IntArrayRef kernel_size,
                                at::IntArrayRef stride, at::IntArrayRef padding, bool ceil_mode,
                                bool count_include_pad,
                                std::optional<std::int64_t> divisor_override) {
  check_dims("kernel_size", kernel_size);
  const std::size_t dims = kernel_size.size();
  return kAvgPool(input, kernel_size, expand_option("stride", stride, dims, kernel_size),
                  expand_option("padding", padding, dims, {0}), ceil_mode, count_include_pad,
                  divisor_override);
}

at::Tensor functional::adaptive_avg_pool(const at::Tensor& input, at::IntArrayRef output_size) {
  return kAdaptiveAvgPool(input, output_size);
}

}  // namespace brim::nn
