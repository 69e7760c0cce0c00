#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>

#include <array>
#include <cstdint>
#include <utility>

#include "nn/ops/pool_geometry.h"

// What the pooling layers share: options a dimension, sizes, and the order of memory.

namespace brim::nn {

/// Options of a pooling, one number a dimension, in a form that costs nothing to keep in a node.
struct PoolOptions {
  using Numbers = std::array<std::int64_t, 3>;

  PoolOptions() = default;
  PoolOptions(at::IntArrayRef kernel_size, at::IntArrayRef stride, at::IntArrayRef padding,
              at::IntArrayRef dilation);

  [[nodiscard]] at::IntArrayRef kernel_size() const { return {kernel.data(), dims}; }
  [[nodiscard]] at::IntArrayRef strides() const { return {stride.data(), dims}; }
  [[nodiscard]] at::IntArrayRef paddings() const { return {padding.data(), dims}; }
  [[nodiscard]] at::IntArrayRef dilations() const { return {dilation.data(), dims}; }

  std::size_t dims = 0;
  Numbers kernel{1, 1, 1};
  Numbers stride{1, 1, 1};
  Numbers padding{};
  Numbers dilation{1, 1, 1};
};

/// Whether `options` hold one number for each of one to three dimensions.
[[nodiscard]] bool is_one_a_dimension(at::IntArrayRef kernel_size, at::IntArrayRef stride,
                                      at::IntArrayRef padding, at::IntArrayRef dilation);

/// `numbers` for `dims` dimensions: as they are, one number repeated, or `otherwise` for none.
/// @throws c10::ValueError for another count.
[[nodiscard]] c10::DimVector expand_option(const char* name, at::IntArrayRef numbers,
                                           std::size_t dims, at::IntArrayRef otherwise);

/// @throws c10::ValueError unless there are one to three.
void check_dims(const char* name, at::IntArrayRef numbers);

/// Whether torch would pool `input` in the order channels last. A batch of one-dimensional samples
/// counts as images of one row, as torch does it.
[[nodiscard]] bool is_channels_last(const at::Tensor& input, std::size_t dims);

/// Strides of a dense tensor of these sizes in either order.
template <class Int>
[[nodiscard]] c10::SmallVector<Int, c10::kDimVectorStaticSize> dense_strides(
    c10::ArrayRef<Int> sizes, bool channels_last) {
  c10::SmallVector<Int, c10::kDimVectorStaticSize> strides(sizes.size(), Int(1));
  Int step(1);
  if (channels_last) {
    step = sizes[1];
  }
  const std::size_t first = channels_last ? 2 : 0;
  for (std::size_t i = sizes.size(); i-- > first;) {
    strides[i] = step;
    step = step * sizes[i];
  }
  if (channels_last) {
    strides[0] = std::move(step);
  }
  return strides;
}

/// `input` dense in that order: itself or a copy.
[[nodiscard]] at::Tensor in_order(const at::Tensor& input, bool channels_last);

/// The geometry of `options` between these sizes (both with or both without the batch).
[[nodiscard]] PoolGeometry geometry_of(const PoolOptions& options, at::IntArrayRef input_sizes,
                                       at::IntArrayRef output_sizes, bool channels_last);

/// Sizes of the output.
template <class Int>
[[nodiscard]] c10::SmallVector<Int, c10::kDimVectorStaticSize> pooled_sizes(
    c10::ArrayRef<Int> input_sizes, const PoolOptions& options, bool ceil_mode) {
  c10::SmallVector<Int, c10::kDimVectorStaticSize> sizes(input_sizes.begin(), input_sizes.end());
  const std::size_t first = sizes.size() - options.dims;
  for (std::size_t i = 0; i < options.dims; ++i) {
    const Int& size = input_sizes[first + i];
    const std::int64_t stride = options.stride[i];
    const std::int64_t reach = options.dilation[i] * (options.kernel[i] - 1) + 1;
    Int out = (size + (2 * options.padding[i] - reach + (ceil_mode ? stride - 1 : 0))) / stride + 1;
    // A window begins inside the input or the padding before it.
    if (ceil_mode && (out - 1) * stride >= size + options.padding[i]) {
      out = out - 1;
    }
    sizes[first + i] = std::move(out);
  }
  return sizes;
}

}  // namespace brim::nn
