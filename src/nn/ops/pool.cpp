#include "nn/ops/pool.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/MemoryFormat.h>

#include <algorithm>

namespace brim::nn {
namespace {

void copy(at::IntArrayRef from, PoolOptions::Numbers& to) {
  std::copy(from.begin(), from.end(), to.begin());
}

}  // namespace

PoolOptions::PoolOptions(at::IntArrayRef kernel_size, at::IntArrayRef strides_of,
                         at::IntArrayRef padding_of, at::IntArrayRef dilation_of)
    : dims(kernel_size.size()) {
  copy(kernel_size, kernel);
  copy(strides_of, stride);
  copy(padding_of, padding);
  copy(dilation_of, dilation);
}

bool is_one_a_dimension(at::IntArrayRef kernel_size, at::IntArrayRef stride,
                        at::IntArrayRef padding, at::IntArrayRef dilation) {
  const std::size_t dims = kernel_size.size();
  return dims >= 1 && dims <= 3 && stride.size() == dims && padding.size() == dims &&
         dilation.size() == dims;
}

c10::DimVector expand_option(const char* name, at::IntArrayRef numbers, std::size_t dims,
                             at::IntArrayRef otherwise) {
  const at::IntArrayRef from = numbers.empty() ? otherwise : numbers;
  TORCH_CHECK_VALUE(from.size() == 1 || from.size() == dims, name, " holds one number or ", dims,
                    ", one a dimension; got ", numbers);
  c10::DimVector expanded(from.begin(), from.end());
  expanded.resize(dims, from[0]);
  return expanded;
}

void check_dims(const char* name, at::IntArrayRef numbers) {
  TORCH_CHECK_VALUE(!numbers.empty() && numbers.size() <= 3, name,
                    " holds one number for each of one, two or three dimensions; got ", numbers);
}

bool is_channels_last(const at::Tensor& input, std::size_t dims) {
  if (static_cast<std::size_t>(input.dim()) != dims + 2) {
    return false;
  }
  if (dims != 1) {
    return input.suggest_memory_format() != at::MemoryFormat::Contiguous;
  }
  if (input.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
    return input.unsqueeze(-2).suggest_memory_format() != at::MemoryFormat::Contiguous;
  }
  const auto sizes = input.sizes();
  const auto strides = input.strides();
  const std::array<std::int64_t, 4> image_sizes = {sizes[0], sizes[1], 1, sizes[2]};
  const std::array<std::int64_t, 4> image_strides = {strides[0], strides[1], sizes[2] * strides[2],
                                                     strides[2]};
  return c10::is_channels_last_strides_2d<std::int64_t>(image_sizes, image_strides);
}

at::Tensor in_order(const at::Tensor& input, bool channels_last) {
  const auto strides = dense_strides(input.sizes(), channels_last);
  // Strides of dimensions of size 1 say nothing.
  bool fits = true;
  for (std::size_t i = 0; i < strides.size(); ++i) {
    fits = fits && (input.strides()[i] == strides[i] || input.sizes()[i] == 1);
  }
  if (fits) {
    return input;
  }
  return at::empty_strided(input.sizes(), strides, input.options()).copy_(input);
}

PoolGeometry geometry_of(const PoolOptions& options, at::IntArrayRef input_sizes,
                         at::IntArrayRef output_sizes, bool channels_last) {
  PoolGeometry geometry;
  const std::size_t first = input_sizes.size() - options.dims;
  geometry.batch = first == 2 ? input_sizes[0] : 1;
  geometry.channels = input_sizes[first - 1];
  geometry.channels_last = channels_last;
  for (std::size_t i = 0; i < options.dims; ++i) {
    const std::size_t to = 3 - options.dims + i;
    geometry.in[to] = input_sizes[first + i];
    geometry.out[to] = output_sizes[first + i];
    geometry.kernel[to] = options.kernel[i];
    geometry.stride[to] = options.stride[i];
    geometry.padding[to] = options.padding[i];
    geometry.dilation[to] = options.dilation[i];
  }
  return geometry;
}

}  // namespace brim::nn
