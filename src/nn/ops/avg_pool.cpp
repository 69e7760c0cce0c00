#include "nn/ops/avg_pool.h"
#include "nn/autograd/autocast.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/avg_pool1d.h>
#include <ATen/ops/avg_pool2d.h>
#include <ATen/ops/avg_pool2d_backward.h>
#include <ATen/ops/avg_pool3d.h>
#include <ATen/ops/avg_pool3d_backward.h>
#include <ATen/ops/empty_strided.h>
#include <brim/nn/functional.h>
#include <torch/library.h>

#include <algorithm>
#include <array>

#include "nn/autograd/known.h"
#include "nn/autograd/node.h"
#include "nn/ops/cuda_kernels.h"
#include "nn/ops/pool.h"

namespace brim::nn {
namespace {

using at::IntArrayRef;
using c10::SymIntArrayRef;
using Divisor = std::optional<std::int64_t>;

using PoolOp = at::Tensor(const at::Tensor&, IntArrayRef, IntArrayRef, IntArrayRef, bool, bool,
                          Divisor);
using BackwardOp = at::Tensor(const at::Tensor&, SymIntArrayRef, IntArrayRef, IntArrayRef,
                              IntArrayRef, bool, bool, Divisor, bool);

constexpr std::array<std::int64_t, 3> kOnes = {1, 1, 1};

template <class Signature>
auto find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

at::Tensor pool(const at::Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                IntArrayRef padding, bool ceil_mode, bool count_include_pad, Divisor divisor) {
  static const auto op = find<PoolOp>("brim::avg_pool");
  return op.call(input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor);
}

at::Tensor value_of(const at::Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                    IntArrayRef padding, bool ceil_mode, bool count_include_pad, Divisor divisor) {
  check_dims("kernel_size", kernel_size);
  switch (kernel_size.size()) {
    case 1:
      TORCH_CHECK_VALUE(!divisor, "divisor_override is for two and three dimensions, got ",
                        *divisor, " with kernel_size ", kernel_size);
      return at::avg_pool1d(input, kernel_size, stride, padding, ceil_mode, count_include_pad);
    case 2:
      return at::avg_pool2d(input, kernel_size, stride, padding, ceil_mode, count_include_pad,
                            divisor);
    default:
      return at::avg_pool3d(input, kernel_size, stride, padding, ceil_mode, count_include_pad,
                            divisor);
  }
}

// -- Backward, below autograd ------------------------------------------------------------------

at::Tensor backward_with_kernel(const at::Tensor& grad, SymIntArrayRef input_sizes,
                                IntArrayRef kernel_size, IntArrayRef stride, IntArrayRef padding,
                                bool /*ceil_mode*/, bool count_include_pad, Divisor divisor,
                                bool channels_last) {
  const IntArrayRef dilation =
      IntArrayRef(kOnes).slice(0, std::min(kernel_size.size(), kOnes.size()));
  TORCH_CHECK_VALUE(is_one_a_dimension(kernel_size, stride, padding, dilation),
                    "kernel_size, stride and padding hold one number a dimension; got ",
                    kernel_size, ", ", stride, " and ", padding);
  const PoolOptions options(kernel_size, stride, padding, dilation);
  const IntArrayRef sizes = C10_AS_INTARRAYREF_SLOW(input_sizes);
  const PoolGeometry geometry = geometry_of(options, sizes, grad.sizes(), channels_last);
  const AvgRule rule{false, count_include_pad, divisor.value_or(0)};
  at::Tensor grad_input =
      at::empty_strided(sizes, dense_strides(sizes, channels_last), grad.options());
  auto* const run = grad.is_cuda() ? cuda_kernels()->avg_pool_backward : cpu::avg_pool_backward;
  run(in_order(grad, channels_last), grad_input, geometry, rule);
  return grad_input;
}

/// torch's backward takes the input for its sizes: memory that nobody writes to stands for it.
at::Tensor backward_anywhere(const at::Tensor& grad, SymIntArrayRef input_sizes,
                             IntArrayRef kernel_size, IntArrayRef stride, IntArrayRef padding,
                             bool ceil_mode, bool count_include_pad, Divisor divisor,
                             bool channels_last) {
  const IntArrayRef sizes = C10_AS_INTARRAYREF_SLOW(input_sizes);
  const at::Tensor input =
      at::empty_strided(sizes, dense_strides(sizes, channels_last), grad.options());
  switch (kernel_size.size()) {
    case 1:
      return at::avg_pool2d_backward(grad.unsqueeze(-2), input.unsqueeze(-2), {1, kernel_size[0]},
                                     {1, stride[0]}, {0, padding[0]}, ceil_mode, count_include_pad,
                                     divisor)
          .squeeze(-2);
    case 2:
      return at::avg_pool2d_backward(grad, input, kernel_size, stride, padding, ceil_mode,
                                     count_include_pad, divisor);
    default:
      return at::avg_pool3d_backward(grad, input, kernel_size, stride, padding, ceil_mode,
                                     count_include_pad, divisor);
  }
}

at::Tensor backward_cuda(const at::Tensor& grad, SymIntArrayRef input_sizes,
                         IntArrayRef kernel_size, IntArrayRef stride, IntArrayRef padding,
                         bool ceil_mode, bool count_include_pad, Divisor divisor,
                         bool channels_last) {
  const CudaKernels* const kernels = cuda_kernels();
  const bool ours = kernels != nullptr && kernels->avg_pool_backward != nullptr;
  return (ours ? backward_with_kernel : backward_anywhere)(grad, input_sizes, kernel_size, stride,
                                                           padding, ceil_mode, count_include_pad,
                                                           divisor, channels_last);
}

at::Tensor backward_meta(const at::Tensor& grad, SymIntArrayRef input_sizes, IntArrayRef,
                         IntArrayRef, IntArrayRef, bool, bool, Divisor, bool channels_last) {
  return at::empty_strided_symint(input_sizes, dense_strides(input_sizes, channels_last),
                                  grad.options());
}

// -- Autograd ----------------------------------------------------------------------------------

/// Either direction; keeps no tensor.
struct AvgPoolNode : public SavingNode {
  void release_variables() override {}

  PoolOptions options;
  bool ceil_mode = false;
  bool count_include_pad = true;
  Divisor divisor;
};

struct ForwardNode final : public AvgPoolNode {
  variable_list apply(variable_list&& grads) override {
    if (!grads[0].defined()) {
      return {at::Tensor()};
    }
    static const auto op = find<BackwardOp>("brim::avg_pool_backward");
    return {tied_to(next_edge(0), op.call(grads[0], input_sizes, options.kernel_size(),
                                          options.strides(), options.paddings(), ceil_mode,
                                          count_include_pad, divisor, channels_last))};
  }

  std::string name() const override { return "brim::avg_pool_backward"; }

  c10::SymDimVector input_sizes;
  bool channels_last = false;
};

struct BackwardNode final : public AvgPoolNode {
  variable_list apply(variable_list&& grads) override {
    if (!grads[0].defined()) {
      return {at::Tensor()};
    }
    return {pool(grads[0], options.kernel_size(), options.strides(), options.paddings(), ceil_mode,
                 count_include_pad, divisor)};
  }

  std::string name() const override { return "brim::avg_pool_double_backward"; }
};

template <class NodeType>
PtrTo<NodeType> node_for(const at::Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                         IntArrayRef padding, bool ceil_mode, bool count_include_pad,
                         Divisor divisor) {
  const std::size_t dims = kernel_size.size();
  auto node = make_node<NodeType>();
  node->set_next_edges(torch::autograd::collect_next_edges(input));
  node->options =
      PoolOptions(kernel_size, expand_option("stride", stride, dims, kernel_size),
                  expand_option("padding", padding, dims, {0}), IntArrayRef(kOnes).slice(0, dims));
  node->ceil_mode = ceil_mode;
  node->count_include_pad = count_include_pad;
  node->divisor = divisor;
  return node;
}

at::Tensor avg_pool_autograd(const at::Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                             IntArrayRef padding, bool ceil_mode, bool count_include_pad,
                             Divisor divisor) {
  at::Tensor output = [&] {
    const BelowAutograd below;
    return value_of(input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor);
  }();
  if (!needs_grad(input)) {
    return output;
  }
  const auto node = node_for<ForwardNode>(input, kernel_size, stride, padding, ceil_mode,
                                          count_include_pad, divisor);
  const auto sizes = input.sym_sizes();
  node->input_sizes = c10::SymDimVector(sizes.begin(), sizes.end());
  // Of three dimensions torch's is contiguous whatever the input is.
  node->channels_last = kernel_size.size() < 3 && is_channels_last(input, kernel_size.size());
  torch::autograd::set_history(output, node);
  return output;
}

at::Tensor backward_autograd(const at::Tensor& grad, SymIntArrayRef input_sizes,
                             IntArrayRef kernel_size, IntArrayRef stride, IntArrayRef padding,
                             bool ceil_mode, bool count_include_pad, Divisor divisor,
                             bool channels_last) {
  refuse_forward_ad("avg_pool", grad);
  at::Tensor grad_input = [&] {
    const BelowAutograd below;
    static const auto op = find<BackwardOp>("brim::avg_pool_backward");
    return op.call(grad, input_sizes, kernel_size, stride, padding, ceil_mode, count_include_pad,
                   divisor, channels_last);
  }();
  if (needs_grad(grad)) {
    torch::autograd::set_history(
        grad_input, node_for<BackwardNode>(grad, kernel_size, stride, padding, ceil_mode,
                                           count_include_pad, divisor));
  }
  return grad_input;
}

/// As torch: in float32 with three dimensions.
at::Tensor avg_pool_autocast(const at::Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                             IntArrayRef padding, bool ceil_mode, bool count_include_pad,
                             Divisor divisor) {
  const Autocast autocast(at::kCPU);
  return pool(kernel_size.size() == 3 ? autocast.cast(at::kFloat, input) : input, kernel_size,
              stride, padding, ceil_mode, count_include_pad, divisor);
}

}  // namespace

namespace functional {

at::Tensor avg_pool(const at::Tensor& input, at::IntArrayRef kernel_size, at::IntArrayRef stride,
                    at::IntArrayRef padding, bool ceil_mode, bool count_include_pad,
                    std::optional<std::int64_t> divisor_override) {
  check_dims("kernel_size", kernel_size);
  const std::size_t dims = kernel_size.size();
  return pool(input, kernel_size, expand_option("stride", stride, dims, kernel_size),
              expand_option("padding", padding, dims, {0}), ceil_mode, count_include_pad,
              divisor_override);
}

}  // namespace functional

TORCH_LIBRARY_FRAGMENT(brim, m) {
  m.def(
      "avg_pool(Tensor input, int[] kernel_size, int[] stride, int[] padding, bool ceil_mode, "
      "bool count_include_pad, int? divisor_override) -> Tensor");
  m.def(
      "avg_pool_backward(Tensor grad, SymInt[] input_sizes, int[] kernel_size, int[] stride, "
      "int[] padding, bool ceil_mode, bool count_include_pad, int? divisor_override, "
      "bool channels_last) -> Tensor",
      {at::Tag::needs_fixed_stride_order});
}

TORCH_LIBRARY_IMPL(brim, CPU, m) { m.impl("avg_pool_backward", backward_with_kernel); }
TORCH_LIBRARY_IMPL(brim, CUDA, m) { m.impl("avg_pool_backward", backward_cuda); }
TORCH_LIBRARY_IMPL(brim, Meta, m) { m.impl("avg_pool_backward", backward_meta); }

TORCH_LIBRARY_IMPL(brim, CompositeExplicitAutograd, m) {
  m.impl("avg_pool", value_of);
  m.impl("avg_pool_backward", backward_anywhere);
}

// Under vmap as torch does it: torch knows how to batch its own operators.
TORCH_LIBRARY_IMPL(brim, FuncTorchBatched, m) { m.impl("avg_pool", value_of); }

TORCH_LIBRARY_IMPL(brim, AutocastCPU, m) { m.impl("avg_pool", avg_pool_autocast); }

TORCH_LIBRARY_IMPL(brim, Autograd, m) {
  m.impl("avg_pool", kOrTorchs<avg_pool_autograd, value_of>);
  m.impl("avg_pool_backward", backward_autograd);
}

}  // namespace brim::nn
