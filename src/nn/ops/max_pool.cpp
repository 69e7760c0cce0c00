#include <ATen/ops/arange.h>
#include <ATen/ops/max_pool1d.h>
#include <ATen/ops/max_pool1d_with_indices.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/max_pool2d_with_indices.h>
#include <ATen/ops/max_pool3d.h>
#include <ATen/ops/max_pool3d_with_indices.h>
#include <ATen/ops/zeros.h>
#include <brim/nn/functional.h>

#include <limits>

#include "nn/autograd/linear_history.h"
#include "nn/autograd/operator.h"
#include "nn/ops/max_pool_kernels.h"

namespace brim::nn {
namespace {

using at::IntArrayRef;
using c10::SymIntArrayRef;
using TwoTensors = std::tuple<at::Tensor, at::Tensor>;

// -- torch's own, by the number of dimensions --------------------------------------------------

at::Tensor torch_max_pool(const at::Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                          IntArrayRef padding, IntArrayRef dilation, bool ceil_mode) {
  check_dims("kernel_size", kernel_size);
  auto* const pool = kernel_size.size() == 1   ? &at::max_pool1d
                     : kernel_size.size() == 2 ? &at::max_pool2d
                                               : &at::max_pool3d;
  return pool(input, kernel_size, stride, padding, dilation, ceil_mode);
}

TwoTensors torch_max_pool_with_indices(const at::Tensor& input, IntArrayRef kernel_size,
                                       IntArrayRef stride, IntArrayRef padding,
                                       IntArrayRef dilation, bool ceil_mode) {
  check_dims("kernel_size", kernel_size);
  auto* const pool = kernel_size.size() == 1   ? &at::max_pool1d_with_indices
                     : kernel_size.size() == 2 ? &at::max_pool2d_with_indices
                                               : &at::max_pool3d_with_indices;
  return pool(input, kernel_size, stride, padding, dilation, ceil_mode);
}

// -- Offsets and indices -----------------------------------------------------------------------

/// Where the windows begin along dimension `i`, shaped to go with the output.
at::Tensor starts(const PoolWindow& window, std::size_t i, const at::Tensor& output) {
  const std::size_t after = window.dims() - 1 - i;
  const c10::SymInt size = output.sym_size(-1 - static_cast<std::int64_t>(after));
  const std::array<c10::SymInt, 3> shape = {size, 1, 1};
  return at::arange(size, output.options().dtype(at::kLong))
      .mul(window.stride()[i])
      .sub(window.padding()[i])
      .view_symint(SymIntArrayRef(shape).slice(0, after + 1));
}

/// Places as torch writes them: int64, counted in the sample's channel.
at::Tensor indices_of(const at::Tensor& offsets, SymIntArrayRef input_sizes,
                      const PoolWindow& window, bool channels_last) {
  // A window's first place, and how far from it each of the places lies.
  at::Tensor first;
  at::Tensor steps;
  at::Tensor places =
      at::arange(c10::multiply_integers(window.kernel_size()), offsets.options().dtype(at::kLong));
  c10::SymInt step = 1;
  for (std::size_t i = window.dims(); i-- > 0;) {
    const at::Tensor start = starts(window, i, offsets).mul(step);
    const at::Tensor place =
        places.remainder(window.kernel_size()[i]).mul(window.dilation()[i]).mul(step);
    first = first.defined() ? first.add(start) : start;
    steps = steps.defined() ? steps.add(place) : place;
    places = places.div(window.kernel_size()[i], "floor");
    step = step * input_sizes[input_sizes.size() - window.dims() + i];
  }
  const auto sizes = offsets.sym_sizes();
  const at::Tensor indices =
      steps.index_select(0, offsets.to(at::kInt).flatten()).view_symint(sizes).add_(first);
  return channels_last ? empty_in_order(sizes, true, indices.options()).copy_(indices) : indices;
}

/// The last dimensions, which are pooled, as one.
at::Tensor as_planes(const at::Tensor& tensor, std::size_t dims) {
  c10::SymDimVector sizes(tensor.sym_sizes().slice(0, tensor.dim() - dims));
  sizes.push_back(c10::multiply_integers(tensor.sym_sizes().slice(tensor.dim() - dims)));
  return tensor.reshape_symint(sizes);  // which vmap knows, unlike flatten
}

// -- Operators: see max_pool_kernels.h -----------------------------------------------------------

TwoTensors pack_anywhere(const at::Tensor& input, IntArrayRef numbers, bool ceil_mode) {
  const PoolWindow window(numbers);
  const bool channels_last = is_channels_last(input, window.dims());
  auto [output, rest] = torch_max_pool_with_indices(input, window.kernel_size(), window.stride(),
                                                    window.padding(), window.dilation(), ceil_mode);
  at::Tensor offsets;
  std::int64_t step = 1;
  for (std::size_t i = window.dims(); i-- > 0;) {
    const std::int64_t size = input.size(-static_cast<std::int64_t>(window.dims() - i));
    const at::Tensor place =
        rest.remainder(size).sub_(starts(window, i, output)).div(window.dilation()[i], "floor");
    offsets = offsets.defined() ? offsets.add_(place, step) : place;
    rest = rest.div(size, "floor");
    step *= window.kernel_size()[i];
  }
  return {in_order(output, channels_last), in_order(offsets.to(at::kByte), channels_last)};
}

TwoTensors pack_meta(const at::Tensor& input, IntArrayRef numbers, bool ceil_mode) {
  const PoolWindow window(numbers);
  const auto sizes = pooled_sizes(input.sym_sizes(), window, ceil_mode);
  const bool channels_last = is_channels_last(input, window.dims());
  const auto empty = [&](at::ScalarType type) {
    return empty_in_order(SymIntArrayRef(sizes), channels_last, input.options().dtype(type));
  };
  return {empty(input.scalar_type()), empty(at::kByte)};
}

at::Tensor scatter_anywhere(const at::Tensor& grad, const at::Tensor& offsets,
                            SymIntArrayRef input_sizes, IntArrayRef numbers, bool channels_last) {
  const PoolWindow window(numbers);
  const at::Tensor indices = indices_of(offsets, input_sizes, window, channels_last);
  const at::Tensor zeros = at::zeros_symint(input_sizes, grad.options());
  const at::Tensor sums =
      as_planes(zeros, window.dims())
          .scatter_add(-1, as_planes(indices, window.dims()), as_planes(grad, window.dims()));
  return in_order(sums.view_symint(input_sizes), channels_last);
}

at::Tensor scatter_meta(const at::Tensor& grad, const at::Tensor&, SymIntArrayRef input_sizes,
                        IntArrayRef, bool channels_last) {
  return empty_in_order(input_sizes, channels_last, grad.options());
}

at::Tensor scatter_autograd(const at::Tensor& grad, const at::Tensor& offsets,
                            SymIntArrayRef input_sizes, IntArrayRef numbers, bool channels_last);

const Operator<pack_anywhere> kPack(
    "max_pool_pack(Tensor input, int[] window, bool ceil_mode) -> (Tensor, Tensor)",
    {.cpu = max_pool_pack_with<cpu::max_pool_pack>, .meta = pack_meta},
    {at::Tag::needs_fixed_stride_order});
const Operator<scatter_anywhere> kScatter(
    "max_pool_scatter(Tensor grad, Tensor offsets, SymInt[] input_sizes, int[] window, "
    "bool channels_last) -> Tensor",
    {.cpu = max_pool_scatter_with<cpu::max_pool_scatter>,
     .meta = scatter_meta,
     .autograd = scatter_autograd},
    {at::Tag::needs_fixed_stride_order});

// -- Autograd ----------------------------------------------------------------------------------

at::Tensor scatter_autograd(const at::Tensor& grad, const at::Tensor& offsets,
                            SymIntArrayRef input_sizes, IntArrayRef numbers, bool channels_last) {
  refuse_forward_ad("max_pool", grad);
  at::Tensor grad_input =
      below_autograd([&] { return kScatter(grad, offsets, input_sizes, numbers, channels_last); });
  if (needs_grad(grad)) {
    set_linear_history(
        grad_input, grad, "brim::max_pool_double_backward", false,
        [=, sizes = c10::SymDimVector(input_sizes), window = PoolWindow(numbers)](
            const at::Tensor& up, const at::Tensor& places) {
          const at::Tensor indices = indices_of(places, sizes, window, channels_last);
          return as_planes(up, window.dims())
              .gather(-1, as_planes(indices, window.dims()))
              .reshape_symint(indices.sym_sizes());
        },
        offsets);
  }
  return grad_input;
}

/// Whether a byte can hold the places and the arguments are right. Else torch does all of it, or
/// says what is wrong.
bool fits_a_byte(const at::Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                 IntArrayRef padding, IntArrayRef dilation, bool ceil_mode) {
  const std::size_t dims = kernel_size.size();
  const auto sizes = input.sym_sizes();
  if (dims < 1 || dims > 3 || stride.size() != dims || padding.size() != dims ||
      dilation.size() != dims || (sizes.size() != dims + 1 && sizes.size() != dims + 2) ||
      input.sym_numel() == 0) {
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

/// The pooling with its node, which keeps a byte per output; gives output and offsets.
TwoTensors pack_with_node(const at::Tensor& input, const PoolWindow& window, bool ceil_mode) {
  TwoTensors result = below_autograd([&] { return kPack(input, window.numbers(), ceil_mode); });
  const bool channels_last = is_channels_last(input, window.dims());
  set_linear_history(
      std::get<0>(result), input, "brim::max_pool_backward", true,
      [=, sizes = c10::SymDimVector(input.sym_sizes())](const at::Tensor& grad,
                                                        const at::Tensor& offsets) {
        return kScatter(grad, offsets, sizes, window.numbers(), channels_last);
      },
      std::get<1>(result));
  return result;
}

/// torch's pooling, which keeps the input.
template <class Pool>
auto run_torchs(const at::Tensor& input, const Pool& pool) {
  if (!needs_grad(input)) {
    const BelowAutograd below;
    return pool();
  }
  auto result = pool();
  tell_producer_kept(input);
  return result;
}

at::Tensor max_pool_autograd(const at::Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                             IntArrayRef padding, IntArrayRef dilation, bool ceil_mode) {
  if (!needs_grad(input) ||
      !fits_a_byte(input, kernel_size, stride, padding, dilation, ceil_mode)) {
    return run_torchs(input, [&] {
      return torch_max_pool(input, kernel_size, stride, padding, dilation, ceil_mode);
    });
  }
  return std::get<0>(
      pack_with_node(input, PoolWindow(kernel_size, stride, padding, dilation), ceil_mode));
}

TwoTensors max_pool_with_indices_autograd(const at::Tensor& input, IntArrayRef kernel_size,
                                          IntArrayRef stride, IntArrayRef padding,
                                          IntArrayRef dilation, bool ceil_mode) {
  if (!needs_grad(input) ||
      !fits_a_byte(input, kernel_size, stride, padding, dilation, ceil_mode)) {
    return run_torchs(input, [&] {
      return torch_max_pool_with_indices(input, kernel_size, stride, padding, dilation, ceil_mode);
    });
  }
  const PoolWindow window(kernel_size, stride, padding, dilation);
  auto [output, offsets] = pack_with_node(input, window, ceil_mode);
  at::Tensor indices =
      indices_of(offsets, input.sym_sizes(), window, is_channels_last(input, window.dims()));
  return {std::move(output), std::move(indices)};
}

const LayerOperator<max_pool_autograd, torch_max_pool, CastTo::float32_in_3d> kMaxPool(
    "max_pool(Tensor input, int[] kernel_size, int[] stride, int[] padding, int[] dilation, "
    "bool ceil_mode) -> Tensor",
    {kInGraphs});
const LayerOperator<max_pool_with_indices_autograd, torch_max_pool_with_indices>
    kMaxPoolWithIndices(
        "max_pool_with_indices(Tensor input, int[] kernel_size, int[] stride, int[] padding, "
        "int[] dilation, bool ceil_mode) -> (Tensor, Tensor)");

/// Calls `op` with the options written out, one number per dimension.
template <class Op>
auto call_expanded(const Op& op, const at::Tensor& input, IntArrayRef kernel_size,
                   IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool ceil_mode) {
  check_dims("kernel_size", kernel_size);
  const std::size_t dims = kernel_size.size();
  return op(input, kernel_size, expand_option("stride", stride, dims, kernel_size),
            expand_option("padding", padding, dims, {0}),
            expand_option("dilation", dilation, dims, {1}), ceil_mode);
}

}  // namespace

at::Tensor functional::max_pool(const at::Tensor& input, at::IntArrayRef kernel_size,
                                at::IntArrayRef stride, at::IntArrayRef padding,
                                at::IntArrayRef dilation, bool ceil_mode) {
  return call_expanded(kMaxPool, input, kernel_size, stride, padding, dilation, ceil_mode);
}

std::tuple<at::Tensor, at::Tensor> functional::max_pool_with_indices(
    const at::Tensor& input, at::IntArrayRef kernel_size, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool ceil_mode) {
  return call_expanded(kMaxPoolWithIndices, input, kernel_size, stride, padding, dilation,
                       ceil_mode);
}

}  // namespace brim::nn
