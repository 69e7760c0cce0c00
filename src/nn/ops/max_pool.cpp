#include "nn/ops/max_pool.h"
#include "nn/autograd/autocast.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/max_pool1d.h>
#include <ATen/ops/max_pool1d_with_indices.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/max_pool2d_with_indices.h>
#include <ATen/ops/max_pool3d.h>
#include <ATen/ops/max_pool3d_with_indices.h>
#include <brim/nn/functional.h>
#include <torch/library.h>

#include <limits>

#include "nn/autograd/known.h"
#include "nn/autograd/node.h"

namespace brim::nn {
namespace {

using at::IntArrayRef;
using c10::SymIntArrayRef;
using TwoTensors = std::tuple<at::Tensor, at::Tensor>;

// -- torch's own, by the number of dimensions --------------------------------------------------

at::Tensor value_of(const at::Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                    IntArrayRef padding, IntArrayRef dilation, bool ceil_mode) {
  check_dims("kernel_size", kernel_size);
  switch (kernel_size.size()) {
    case 1:
      return at::max_pool1d(input, kernel_size, stride, padding, dilation, ceil_mode);
    case 2:
      return at::max_pool2d(input, kernel_size, stride, padding, dilation, ceil_mode);
    default:
      return at::max_pool3d(input, kernel_size, stride, padding, dilation, ceil_mode);
  }
}

/// Whether a byte can hold the places and the arguments are right. Else torch does all of it, or
/// says what is wrong.
bool fits_a_byte(const at::Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                 IntArrayRef padding, IntArrayRef dilation, bool ceil_mode) {
  if (!is_one_a_dimension(kernel_size, stride, padding, dilation)) {
    return false;
  }
  const std::size_t dims = kernel_size.size();
  const auto sizes = input.sym_sizes();
  if ((sizes.size() != dims + 1 && sizes.size() != dims + 2) || input.sym_numel() == 0) {
    return false;
  }
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  std::int64_t places = 1;
  for (std::size_t i = 0; i < dims; ++i) {
    const std::int64_t kernel = kernel_size[i];
    if (kernel < 1 || kernel > kMostPlaces || stride[i] < 1 || stride[i] > kMost ||
        dilation[i] < 1 || dilation[i] > kMost || padding[i] < 0 || padding[i] > kernel / 2) {
      return false;
    }
    places *= kernel;
    const c10::SymInt& size = sizes[sizes.size() - dims + i];
    const std::int64_t reach = dilation[i] * (kernel - 1) + 1 - (ceil_mode ? stride[i] - 1 : 0);
    // A dilation past the input can step from padding to padding: a window without a value.
    if (size < reach - 2 * padding[i] || (padding[i] > 0 && size < dilation[i])) {
      return false;
    }
  }
  return places <= kMostPlaces;
}

// -- Autograd ----------------------------------------------------------------------------------

/// Keeps a byte an output.
class MaxPoolNode final : public SavingNode {
 public:
  MaxPoolNode(const at::Tensor& offsets, SymIntArrayRef input_sizes, const PoolOptions& options,
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
    return {tied_to(next_edge(0), max_pool_scatter(grads[0], offsets_.unpack(), input_sizes_,
                                                   options_, channels_last_))};
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    offsets_.reset_data();
  }

  std::string name() const override { return "brim::max_pool_backward"; }

 private:
  SavedVariable offsets_;
  c10::SymDimVector input_sizes_;
  PoolOptions options_;
  bool channels_last_;
};

/// The pooling, with the node that takes its gradient back; gives output and offsets.
TwoTensors pack_with_node(const at::Tensor& input, const PoolOptions& options, bool ceil_mode) {
  auto result = [&] {
    const BelowAutograd below;
    return max_pool_pack(input, options, ceil_mode);
  }();
  const auto node = make_node<MaxPoolNode>(std::get<1>(result), input.sym_sizes(), options,
                                           is_channels_last(input, options.dims));
  node->set_next_edges(torch::autograd::collect_next_edges(input));
  torch::autograd::set_history(std::get<0>(result), node);
  return result;
}

at::Tensor max_pool_autograd(const at::Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                             IntArrayRef padding, IntArrayRef dilation, bool ceil_mode) {
  if (!needs_grad(input)) {
    const BelowAutograd below;
    return value_of(input, kernel_size, stride, padding, dilation, ceil_mode);
  }
  if (!fits_a_byte(input, kernel_size, stride, padding, dilation, ceil_mode)) {
    at::Tensor output = value_of(input, kernel_size, stride, padding, dilation, ceil_mode);
    tell_producer_kept(input);
    return output;
  }
  return std::get<0>(
      pack_with_node(input, PoolOptions(kernel_size, stride, padding, dilation), ceil_mode));
}

TwoTensors max_pool_with_indices_autograd(const at::Tensor& input, IntArrayRef kernel_size,
                                          IntArrayRef stride, IntArrayRef padding,
                                          IntArrayRef dilation, bool ceil_mode) {
  if (!needs_grad(input)) {
    const BelowAutograd below;
    return torch_max_pool_with_indices(input, kernel_size, stride, padding, dilation, ceil_mode);
  }
  if (!fits_a_byte(input, kernel_size, stride, padding, dilation, ceil_mode)) {
    auto result =
        torch_max_pool_with_indices(input, kernel_size, stride, padding, dilation, ceil_mode);
    tell_producer_kept(input);
    return result;
  }
  const PoolOptions options(kernel_size, stride, padding, dilation);
  auto [output, offsets] = pack_with_node(input, options, ceil_mode);
  at::Tensor indices =
      max_pool_indices(offsets, input.sym_sizes(), options, is_channels_last(input, options.dims));
  return {std::move(output), std::move(indices)};
}

using PoolOp = at::Tensor(const at::Tensor&, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef,
                          bool);
using PackOp = TwoTensors(const at::Tensor&, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef,
                          bool);
template <class Signature>
auto find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

/// As torch: in float32 with three dimensions.
at::Tensor max_pool_autocast(const at::Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                             IntArrayRef padding, IntArrayRef dilation, bool ceil_mode) {
  const Autocast autocast(at::kCPU);
  static const auto op = find<PoolOp>("brim::max_pool");
  return op.call(kernel_size.size() == 3 ? autocast.cast(at::kFloat, input) : input, kernel_size,
                 stride, padding, dilation, ceil_mode);
}

/// Calls `op` with the options written out, one number a dimension.
template <class Op>
auto call_expanded(const Op& op, const at::Tensor& input, IntArrayRef kernel_size,
                   IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool ceil_mode) {
  check_dims("kernel_size", kernel_size);
  const std::size_t dims = kernel_size.size();
  return op.call(input, kernel_size, expand_option("stride", stride, dims, kernel_size),
                 expand_option("padding", padding, dims, {0}),
                 expand_option("dilation", dilation, dims, {1}), ceil_mode);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> torch_max_pool_with_indices(
    const at::Tensor& input, IntArrayRef kernel_size, IntArrayRef stride, IntArrayRef padding,
    IntArrayRef dilation, bool ceil_mode) {
  check_dims("kernel_size", kernel_size);
  switch (kernel_size.size()) {
    case 1:
      return at::max_pool1d_with_indices(input, kernel_size, stride, padding, dilation, ceil_mode);
    case 2:
      return at::max_pool2d_with_indices(input, kernel_size, stride, padding, dilation, ceil_mode);
    default:
      return at::max_pool3d_with_indices(input, kernel_size, stride, padding, dilation, ceil_mode);
  }
}

namespace functional {

at::Tensor max_pool(const at::Tensor& input, at::IntArrayRef kernel_size, at::IntArrayRef stride,
                    at::IntArrayRef padding, at::IntArrayRef dilation, bool ceil_mode) {
  static const auto op = find<PoolOp>("brim::max_pool");
  return call_expanded(op, input, kernel_size, stride, padding, dilation, ceil_mode);
}

std::tuple<at::Tensor, at::Tensor> max_pool_with_indices(const at::Tensor& input,
                                                         at::IntArrayRef kernel_size,
                                                         at::IntArrayRef stride,
                                                         at::IntArrayRef padding,
                                                         at::IntArrayRef dilation, bool ceil_mode) {
  static const auto op = find<PackOp>("brim::max_pool_with_indices");
  return call_expanded(op, input, kernel_size, stride, padding, dilation, ceil_mode);
}

}  // namespace functional

TORCH_LIBRARY_FRAGMENT(brim, m) {
  m.def(
      "max_pool(Tensor input, int[] kernel_size, int[] stride, int[] padding, int[] dilation, "
      "bool ceil_mode) -> Tensor");
  m.def(
      "max_pool_with_indices(Tensor input, int[] kernel_size, int[] stride, int[] padding, "
      "int[] dilation, bool ceil_mode) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(brim, CompositeExplicitAutograd, m) {
  m.impl("max_pool", value_of);
  m.impl("max_pool_with_indices", torch_max_pool_with_indices);
}

// Under vmap as torch does it: torch knows how to batch its own operators.
TORCH_LIBRARY_IMPL(brim, FuncTorchBatched, m) {
  m.impl("max_pool", value_of);
  m.impl("max_pool_with_indices", torch_max_pool_with_indices);
}

TORCH_LIBRARY_IMPL(brim, AutocastCPU, m) { m.impl("max_pool", max_pool_autocast); }

TORCH_LIBRARY_IMPL(brim, Autograd, m) {
  m.impl("max_pool", kOrTorchs<max_pool_autograd, value_of>);
  m.impl("max_pool_with_indices",
         kOrTorchs<max_pool_with_indices_autograd, torch_max_pool_with_indices>);
}

}  // namespace brim::nn
