#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <array>

#include "nn/autograd/node.h"
#include "nn/ops/cuda_kernels.h"
#include "nn/ops/max_pool.h"

// The operators on offsets, below autograd.

namespace brim::nn {
namespace {

using at::IntArrayRef;
using c10::SymIntArrayRef;
using TwoTensors = std::tuple<at::Tensor, at::Tensor>;

// -- Kernels -----------------------------------------------------------------------------------

PoolOptions checked_options(IntArrayRef kernel_size, IntArrayRef stride, IntArrayRef padding,
                            IntArrayRef dilation) {
  TORCH_CHECK_VALUE(is_one_a_dimension(kernel_size, stride, padding, dilation),
                    "kernel_size, stride, padding and dilation hold one number a dimension; got ",
                    kernel_size, ", ", stride, ", ", padding, " and ", dilation);
  return {kernel_size, stride, padding, dilation};
}

bool has_cuda_kernels() {
  const CudaKernels* const kernels = cuda_kernels();
  return kernels != nullptr && kernels->max_pool_pack != nullptr;
}

TwoTensors pack_with_kernel(const at::Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                            IntArrayRef padding, IntArrayRef dilation, bool ceil_mode) {
  const PoolOptions options = checked_options(kernel_size, stride, padding, dilation);
  const bool channels_last = is_channels_last(input, options.dims);
  const at::Tensor source = in_order(input, channels_last);
  const auto sizes = pooled_sizes(input.sizes(), options, ceil_mode);
  const auto strides = dense_strides(at::IntArrayRef(sizes), channels_last);
  TwoTensors result{at::empty_strided(sizes, strides, input.options()),
                    at::empty_strided(sizes, strides, input.options().dtype(at::kByte))};
  const PoolGeometry geometry = geometry_of(options, input.sizes(), sizes, channels_last);
  auto* const run = input.is_cuda() ? cuda_kernels()->max_pool_pack : cpu::max_pool_pack;
  run(source, std::get<0>(result), std::get<1>(result), geometry);
  return result;
}

at::Tensor scatter_with_kernel(const at::Tensor& grad, const at::Tensor& offsets,
                               SymIntArrayRef input_sizes, IntArrayRef kernel_size,
                               IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                               bool channels_last) {
  const PoolOptions options = checked_options(kernel_size, stride, padding, dilation);
  const IntArrayRef sizes = C10_AS_INTARRAYREF_SLOW(input_sizes);
  const PoolGeometry geometry = geometry_of(options, sizes, offsets.sizes(), channels_last);
  at::Tensor grad_input =
      at::empty_strided(sizes, dense_strides(sizes, channels_last), grad.options());
  auto* const run = grad.is_cuda() ? cuda_kernels()->max_pool_scatter : cpu::max_pool_scatter;
  run(in_order(grad, channels_last), in_order(offsets, channels_last), grad_input, geometry);
  return grad_input;
}

at::Tensor indices_with_kernel(const at::Tensor& offsets, SymIntArrayRef input_sizes,
                               IntArrayRef kernel_size, IntArrayRef stride, IntArrayRef padding,
                               IntArrayRef dilation, bool channels_last) {
  const PoolOptions options = checked_options(kernel_size, stride, padding, dilation);
  const IntArrayRef sizes = C10_AS_INTARRAYREF_SLOW(input_sizes);
  const PoolGeometry geometry = geometry_of(options, sizes, offsets.sizes(), channels_last);
  at::Tensor indices =
      at::empty_strided(offsets.sizes(), dense_strides(offsets.sizes(), channels_last),
                        offsets.options().dtype(at::kLong));
  auto* const run = offsets.is_cuda() ? cuda_kernels()->max_pool_indices : cpu::max_pool_indices;
  run(in_order(offsets, channels_last), indices, geometry);
  return indices;
}

// -- With ATen operators alone: any device -------------------------------------------------------

/// Where the windows begin along dimension `i`, shaped to go with the output.
at::Tensor starts(const PoolOptions& options, std::size_t i, const at::Tensor& output) {
  const std::size_t after = options.dims - 1 - i;
  const std::int64_t size = output.size(-1 - static_cast<std::int64_t>(after));
  const std::array<std::int64_t, 3> shape = {size, 1, 1};
  return at::arange(size, output.options().dtype(at::kLong))
      .mul_(options.stride[i])
      .sub_(options.padding[i])
      .view(IntArrayRef(shape).slice(0, after + 1));
}

at::Tensor divided(const at::Tensor& numbers, std::int64_t by) { return numbers.div(by, "floor"); }

TwoTensors pack_anywhere(const at::Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                         IntArrayRef padding, IntArrayRef dilation, bool ceil_mode) {
  const PoolOptions options = checked_options(kernel_size, stride, padding, dilation);
  const bool channels_last = is_channels_last(input, options.dims);
  auto [output, rest] =
      torch_max_pool_with_indices(input, kernel_size, stride, padding, dilation, ceil_mode);
  at::Tensor offsets;
  std::int64_t step = 1;
  for (std::size_t i = options.dims; i-- > 0;) {
    const std::int64_t size = input.size(-static_cast<std::int64_t>(options.dims - i));
    const at::Tensor place =
        divided(rest.remainder(size).sub_(starts(options, i, output)), options.dilation[i]);
    offsets = offsets.defined() ? offsets.add_(place, step) : place;
    rest = divided(rest, size);
    step *= options.kernel[i];
  }
  return {in_order(output, channels_last), in_order(offsets.to(at::kByte), channels_last)};
}

at::Tensor indices_anywhere(const at::Tensor& offsets, SymIntArrayRef input_sizes,
                            IntArrayRef kernel_size, IntArrayRef stride, IntArrayRef padding,
                            IntArrayRef dilation, bool channels_last) {
  const PoolOptions options = checked_options(kernel_size, stride, padding, dilation);
  const IntArrayRef sizes = C10_AS_INTARRAYREF_SLOW(input_sizes);
  at::Tensor rest = offsets.to(at::kLong);
  at::Tensor indices;
  std::int64_t step = 1;
  for (std::size_t i = options.dims; i-- > 0;) {
    const at::Tensor at = rest.remainder(options.kernel[i])
                              .mul_(options.dilation[i])
                              .add_(starts(options, i, offsets));
    indices = indices.defined() ? indices.add_(at, step) : at;
    rest = divided(rest, options.kernel[i]);
    step *= sizes[sizes.size() - options.dims + i];
  }
  return in_order(indices, channels_last);
}

/// The last dimensions, which are pooled, as one.
at::Tensor as_planes(const at::Tensor& tensor, std::size_t dims) {
  return tensor.flatten(-static_cast<std::int64_t>(dims));
}

at::Tensor scatter_anywhere(const at::Tensor& grad, const at::Tensor& offsets,
                            SymIntArrayRef input_sizes, IntArrayRef kernel_size, IntArrayRef stride,
                            IntArrayRef padding, IntArrayRef dilation, bool channels_last) {
  const std::size_t dims = kernel_size.size();
  const IntArrayRef sizes = C10_AS_INTARRAYREF_SLOW(input_sizes);
  const at::Tensor indices =
      indices_anywhere(offsets, input_sizes, kernel_size, stride, padding, dilation, channels_last);
  const at::Tensor planes = as_planes(at::zeros(sizes, grad.options()), dims);
  return in_order(
      planes.scatter_add(-1, as_planes(indices, dims), as_planes(grad, dims)).view(sizes),
      channels_last);
}

TwoTensors pack_cuda(const at::Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                     IntArrayRef padding, IntArrayRef dilation, bool ceil_mode) {
  return (has_cuda_kernels() ? pack_with_kernel : pack_anywhere)(input, kernel_size, stride,
                                                                 padding, dilation, ceil_mode);
}

at::Tensor scatter_cuda(const at::Tensor& grad, const at::Tensor& offsets,
                        SymIntArrayRef input_sizes, IntArrayRef kernel_size, IntArrayRef stride,
                        IntArrayRef padding, IntArrayRef dilation, bool channels_last) {
  return (has_cuda_kernels() ? scatter_with_kernel : scatter_anywhere)(
      grad, offsets, input_sizes, kernel_size, stride, padding, dilation, channels_last);
}

at::Tensor indices_cuda(const at::Tensor& offsets, SymIntArrayRef input_sizes,
                        IntArrayRef kernel_size, IntArrayRef stride, IntArrayRef padding,
                        IntArrayRef dilation, bool channels_last) {
  return (has_cuda_kernels() ? indices_with_kernel : indices_anywhere)(
      offsets, input_sizes, kernel_size, stride, padding, dilation, channels_last);
}

// -- Shapes alone ------------------------------------------------------------------------------

TwoTensors pack_meta(const at::Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                     IntArrayRef padding, IntArrayRef dilation, bool ceil_mode) {
  const PoolOptions options = checked_options(kernel_size, stride, padding, dilation);
  const auto sizes = pooled_sizes(input.sym_sizes(), options, ceil_mode);
  const auto strides = dense_strides(SymIntArrayRef(sizes), is_channels_last(input, options.dims));
  return {at::empty_strided_symint(sizes, strides, input.options()),
          at::empty_strided_symint(sizes, strides, input.options().dtype(at::kByte))};
}

at::Tensor scatter_meta(const at::Tensor& grad, const at::Tensor&, SymIntArrayRef input_sizes,
                        IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef, bool channels_last) {
  return at::empty_strided_symint(input_sizes, dense_strides(input_sizes, channels_last),
                                  grad.options());
}

at::Tensor indices_meta(const at::Tensor& offsets, SymIntArrayRef, IntArrayRef, IntArrayRef,
                        IntArrayRef, IntArrayRef, bool channels_last) {
  const auto sizes = offsets.sym_sizes();
  return at::empty_strided_symint(sizes, dense_strides(sizes, channels_last),
                                  offsets.options().dtype(at::kLong));
}

// -- Autograd ----------------------------------------------------------------------------------

/// Linear: its derivative takes from where the maxima came from.
class ScatterNode final : public Node {
 public:
  ScatterNode(const at::Tensor& offsets, SymIntArrayRef input_sizes, const PoolOptions& options,
              bool channels_last)
      : offsets_(offsets, false),
        input_sizes_(input_sizes.begin(), input_sizes.end()),
        options_(options),
        channels_last_(channels_last) {}

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard lock(mutex_);
    if (!grads[0].defined()) {
      return {at::Tensor()};
    }
    const at::Tensor indices =
        max_pool_indices(offsets_.unpack(), input_sizes_, options_, channels_last_);
    return {as_planes(grads[0], options_.dims)
                .gather(-1, as_planes(indices, options_.dims))
                .reshape_symint(indices.sym_sizes())};
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    offsets_.reset_data();
  }

  std::string name() const override { return "brim::max_pool_scatter_backward"; }

 private:
  SavedVariable offsets_;
  c10::SymDimVector input_sizes_;
  PoolOptions options_;
  bool channels_last_;
};

at::Tensor scatter_autograd(const at::Tensor& grad, const at::Tensor& offsets,
                            SymIntArrayRef input_sizes, IntArrayRef kernel_size, IntArrayRef stride,
                            IntArrayRef padding, IntArrayRef dilation, bool channels_last) {
  refuse_forward_ad("max_pool", grad);
  const PoolOptions options = checked_options(kernel_size, stride, padding, dilation);
  at::Tensor grad_input = [&] {
    const BelowAutograd below;
    return max_pool_scatter(grad, offsets, input_sizes, options, channels_last);
  }();
  if (needs_grad(grad)) {
    const auto node = make_node<ScatterNode>(offsets, input_sizes, options, channels_last);
    node->set_next_edges(torch::autograd::collect_next_edges(grad));
    torch::autograd::set_history(grad_input, node);
  }
  return grad_input;
}

using PackOp = TwoTensors(const at::Tensor&, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef,
                          bool);
using ScatterOp = at::Tensor(const at::Tensor&, const at::Tensor&, SymIntArrayRef, IntArrayRef,
                             IntArrayRef, IntArrayRef, IntArrayRef, bool);
using IndicesOp = at::Tensor(const at::Tensor&, SymIntArrayRef, IntArrayRef, IntArrayRef,
                             IntArrayRef, IntArrayRef, bool);

template <class Signature>
auto find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace

TwoTensors max_pool_pack(const at::Tensor& input, const PoolOptions& options, bool ceil_mode) {
  static const auto op = find<PackOp>("brim::max_pool_pack");
  return op.call(input, options.kernel_size(), options.strides(), options.paddings(),
                 options.dilations(), ceil_mode);
}

at::Tensor max_pool_scatter(const at::Tensor& grad, const at::Tensor& offsets,
                            SymIntArrayRef input_sizes, const PoolOptions& options,
                            bool channels_last) {
  static const auto op = find<ScatterOp>("brim::max_pool_scatter");
  return op.call(grad, offsets, input_sizes, options.kernel_size(), options.strides(),
                 options.paddings(), options.dilations(), channels_last);
}

at::Tensor max_pool_indices(const at::Tensor& offsets, SymIntArrayRef input_sizes,
                            const PoolOptions& options, bool channels_last) {
  static const auto op = find<IndicesOp>("brim::max_pool_indices");
  return op.call(offsets, input_sizes, options.kernel_size(), options.strides(), options.paddings(),
                 options.dilations(), channels_last);
}

TORCH_LIBRARY_FRAGMENT(brim, m) {
  m.def(
      "max_pool_pack(Tensor input, int[] kernel_size, int[] stride, int[] padding, "
      "int[] dilation, bool ceil_mode) -> (Tensor, Tensor)",
      {at::Tag::needs_fixed_stride_order});
  m.def(
      "max_pool_scatter(Tensor grad, Tensor offsets, SymInt[] input_sizes, int[] kernel_size, "
      "int[] stride, int[] padding, int[] dilation, bool channels_last) -> Tensor",
      {at::Tag::needs_fixed_stride_order});
  m.def(
      "max_pool_indices(Tensor offsets, SymInt[] input_sizes, int[] kernel_size, int[] stride, "
      "int[] padding, int[] dilation, bool channels_last) -> Tensor",
      {at::Tag::needs_fixed_stride_order});
}

TORCH_LIBRARY_IMPL(brim, CPU, m) {
  m.impl("max_pool_pack", pack_with_kernel);
  m.impl("max_pool_scatter", scatter_with_kernel);
  m.impl("max_pool_indices", indices_with_kernel);
}

TORCH_LIBRARY_IMPL(brim, CUDA, m) {
  m.impl("max_pool_pack", pack_cuda);
  m.impl("max_pool_scatter", scatter_cuda);
  m.impl("max_pool_indices", indices_cuda);
}

TORCH_LIBRARY_IMPL(brim, Meta, m) {
  m.impl("max_pool_pack", pack_meta);
  m.impl("max_pool_scatter", scatter_meta);
  m.impl("max_pool_indices", indices_meta);
}

TORCH_LIBRARY_IMPL(brim, CompositeExplicitAutograd, m) {
  m.impl("max_pool_pack", pack_anywhere);
  m.impl("max_pool_scatter", scatter_anywhere);
  m.impl("max_pool_indices", indices_anywhere);
}

TORCH_LIBRARY_IMPL(brim, Autograd, m) { m.impl("max_pool_scatter", scatter_autograd); }

}  // namespace brim::nn
