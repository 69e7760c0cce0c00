#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_adaptive_avg_pool2d_backward.h>
#include <ATen/ops/_adaptive_avg_pool3d_backward.h>
#include <ATen/ops/adaptive_avg_pool1d.h>
#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/adaptive_avg_pool3d.h>
#include <ATen/ops/empty_strided.h>
#include <brim/nn/functional.h>
#include <torch/library.h>

#include <algorithm>

#include "nn/autograd/autocast.h"
#include "nn/autograd/known.h"
#include "nn/autograd/node.h"
#include "nn/ops/avg_pool.h"
#include "nn/ops/cuda_kernels.h"
#include "nn/ops/pool.h"

namespace brim::nn {
namespace {

using at::IntArrayRef;
using c10::SymIntArrayRef;

using PoolOp = at::Tensor(const at::Tensor&, IntArrayRef);
using BackwardOp = at::Tensor(const at::Tensor&, SymIntArrayRef, std::int64_t, bool);

template <class Signature>
auto find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

at::Tensor value_of(const at::Tensor& input, IntArrayRef output_size) {
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

// -- Backward, below autograd ------------------------------------------------------------------

/// @param dims how many of the last dimensions are pooled
at::Tensor backward_with_kernel(const at::Tensor& grad, SymIntArrayRef input_sizes,
                                std::int64_t dims, bool channels_last) {
  const IntArrayRef sizes = C10_AS_INTARRAYREF_SLOW(input_sizes);
  PoolOptions options;
  options.dims = static_cast<std::size_t>(dims);
  const PoolGeometry geometry = geometry_of(options, sizes, grad.sizes(), channels_last);
  const AvgRule rule{true, true, 0};
  at::Tensor grad_input =
      at::empty_strided(sizes, dense_strides(sizes, channels_last), grad.options());
  auto* const run = grad.is_cuda() ? cuda_kernels()->avg_pool_backward : cpu::avg_pool_backward;
  run(in_order(grad, channels_last), grad_input, geometry, rule);
  return grad_input;
}

/// torch's backward takes the input for its sizes: memory that nobody writes to stands for it.
at::Tensor backward_anywhere(const at::Tensor& grad, SymIntArrayRef input_sizes, std::int64_t dims,
                             bool channels_last) {
  const IntArrayRef sizes = C10_AS_INTARRAYREF_SLOW(input_sizes);
  const at::Tensor input =
      at::empty_strided(sizes, dense_strides(sizes, channels_last), grad.options());
  switch (dims) {
    case 1:
      return at::_adaptive_avg_pool2d_backward(grad.unsqueeze(-2), input.unsqueeze(-2)).squeeze(-2);
    case 2:
      return at::_adaptive_avg_pool2d_backward(grad, input);
    default:
      return at::_adaptive_avg_pool3d_backward(grad, input);
  }
}

at::Tensor backward_cuda(const at::Tensor& grad, SymIntArrayRef input_sizes, std::int64_t dims,
                         bool channels_last) {
  const CudaKernels* const kernels = cuda_kernels();
  const bool ours = kernels != nullptr && kernels->avg_pool_backward != nullptr;
  return (ours ? backward_with_kernel : backward_anywhere)(grad, input_sizes, dims, channels_last);
}

at::Tensor backward_meta(const at::Tensor& grad, SymIntArrayRef input_sizes, std::int64_t,
                         bool channels_last) {
  return at::empty_strided_symint(input_sizes, dense_strides(input_sizes, channels_last),
                                  grad.options());
}

// -- Autograd: nodes that keep no tensor -------------------------------------------------------

struct ForwardNode final : public SavingNode {
  variable_list apply(variable_list&& grads) override {
    if (!grads[0].defined()) {
      return {at::Tensor()};
    }
    static const auto op = find<BackwardOp>("brim::adaptive_avg_pool_backward");
    return {tied_to(next_edge(0), op.call(grads[0], input_sizes, dims, channels_last))};
  }

  void release_variables() override {}
  std::string name() const override { return "brim::adaptive_avg_pool_backward"; }

  c10::SymDimVector input_sizes;
  std::int64_t dims = 0;
  bool channels_last = false;
};

struct BackwardNode final : public Node {
  variable_list apply(variable_list&& grads) override {
    if (!grads[0].defined()) {
      return {at::Tensor()};
    }
    return {functional::adaptive_avg_pool(grads[0], output_size)};
  }

  void release_variables() override {}
  std::string name() const override { return "brim::adaptive_avg_pool_double_backward"; }

  c10::DimVector output_size;
};

at::Tensor adaptive_avg_pool_autograd(const at::Tensor& input, IntArrayRef output_size) {
  if (!needs_grad(input)) {
    const BelowAutograd below;
    return value_of(input, output_size);
  }
  // To one value torch takes the mean, whose backward keeps nothing.
  const auto is_one = [](std::int64_t size) { return size == 1; };
  if (std::all_of(output_size.begin(), output_size.end(), is_one)) {
    return value_of(input, output_size);
  }
  at::Tensor output = [&] {
    const BelowAutograd below;
    return value_of(input, output_size);
  }();
  const auto node = make_node<ForwardNode>();
  node->set_next_edges(torch::autograd::collect_next_edges(input));
  const auto sizes = input.sym_sizes();
  node->input_sizes = c10::SymDimVector(sizes.begin(), sizes.end());
  node->dims = static_cast<std::int64_t>(output_size.size());
  node->channels_last = is_channels_last(input, output_size.size());
  torch::autograd::set_history(output, node);
  return output;
}

at::Tensor backward_autograd(const at::Tensor& grad, SymIntArrayRef input_sizes, std::int64_t dims,
                             bool channels_last) {
  refuse_forward_ad("adaptive_avg_pool", grad);
  at::Tensor grad_input = [&] {
    const BelowAutograd below;
    static const auto op = find<BackwardOp>("brim::adaptive_avg_pool_backward");
    return op.call(grad, input_sizes, dims, channels_last);
  }();
  if (needs_grad(grad)) {
    const auto node = make_node<BackwardNode>();
    node->set_next_edges(torch::autograd::collect_next_edges(grad));
    const IntArrayRef pooled = grad.sizes().slice(static_cast<std::size_t>(grad.dim() - dims));
    node->output_size = c10::DimVector(pooled.begin(), pooled.end());
    torch::autograd::set_history(grad_input, node);
  }
  return grad_input;
}

/// As torch: in float32 with three dimensions.
at::Tensor adaptive_avg_pool_autocast(const at::Tensor& input, IntArrayRef output_size) {
  const Autocast autocast(at::kCPU);
  return functional::adaptive_avg_pool(
      output_size.size() == 3 ? autocast.cast(at::kFloat, input) : input, output_size);
}

}  // namespace

namespace functional {

at::Tensor adaptive_avg_pool(const at::Tensor& input, at::IntArrayRef output_size) {
  static const auto op = find<PoolOp>("brim::adaptive_avg_pool");
  return op.call(input, output_size);
}

}  // namespace functional

TORCH_LIBRARY_FRAGMENT(brim, m) {
  m.def("adaptive_avg_pool(Tensor input, int[] output_size) -> Tensor");
  m.def(
      "adaptive_avg_pool_backward(Tensor grad, SymInt[] input_sizes, int dims, "
      "bool channels_last) -> Tensor",
      {at::Tag::needs_fixed_stride_order});
}

TORCH_LIBRARY_IMPL(brim, CPU, m) { m.impl("adaptive_avg_pool_backward", backward_with_kernel); }
TORCH_LIBRARY_IMPL(brim, CUDA, m) { m.impl("adaptive_avg_pool_backward", backward_cuda); }
TORCH_LIBRARY_IMPL(brim, Meta, m) { m.impl("adaptive_avg_pool_backward", backward_meta); }

TORCH_LIBRARY_IMPL(brim, CompositeExplicitAutograd, m) {
  m.impl("adaptive_avg_pool", value_of);
  m.impl("adaptive_avg_pool_backward", backward_anywhere);
}

// Under vmap as torch does it: torch knows how to batch its own operators.
TORCH_LIBRARY_IMPL(brim, FuncTorchBatched, m) { m.impl("adaptive_avg_pool", value_of); }

TORCH_LIBRARY_IMPL(brim, AutocastCPU, m) {
  m.impl("adaptive_avg_pool", adaptive_avg_pool_autocast);
}

TORCH_LIBRARY_IMPL(brim, Autograd, m) {
  m.impl("adaptive_avg_pool", kOrTorchs<adaptive_avg_pool_autograd, value_of>);
  m.impl("adaptive_avg_pool_backward", backward_autograd);
}

}  // namespace brim::nn
