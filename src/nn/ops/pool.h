#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/MemoryFormat.h>
#include <c10/util/DimVector.h>

#include <array>
#include <cstdint>
#include <optional>
#include <utility>

#include "nn/ops/pool_geometry.h"

// What the pooling layers share: windows, sizes, and the order of memory. All in the header,
// because libbrim_cuda needs it too.

namespace brim::nn {

/// Kernel size, stride, padding and dilation, one number per dimension each.
class PoolWindow {
 public:
  PoolWindow(at::IntArrayRef kernel_size, at::IntArrayRef stride, at::IntArrayRef padding,
             at::IntArrayRef dilation) {
    for (const at::IntArrayRef each : {kernel_size, stride, padding, dilation}) {
      numbers_.append(each.begin(), each.end());
    }
  }

  /// @param numbers as operators pass a window on: the four options one after the other
  explicit PoolWindow(at::IntArrayRef numbers) : numbers_(numbers.begin(), numbers.end()) {
    TORCH_CHECK_VALUE(numbers.size() % 4 == 0 && !numbers.empty() && numbers.size() <= 12,
                      "window holds four numbers for each of one, two or three dimensions; got ",
                      numbers);
  }

  [[nodiscard]] std::size_t dims() const { return numbers_.size() / 4; }
  [[nodiscard]] at::IntArrayRef kernel_size() const { return option(0); }
  [[nodiscard]] at::IntArrayRef stride() const { return option(1); }
  [[nodiscard]] at::IntArrayRef padding() const { return option(2); }
  [[nodiscard]] at::IntArrayRef dilation() const { return option(3); }
  [[nodiscard]] at::IntArrayRef numbers() const { return numbers_; }

 private:
  [[nodiscard]] at::IntArrayRef option(std::size_t i) const {
    return numbers().slice(i * dims(), dims());
  }

  c10::SmallVector<std::int64_t, 12> numbers_;
};

/// `numbers` for `dims` dimensions: as they are, one number repeated, or `otherwise` for none.
/// @throws c10::ValueError for another count.
[[nodiscard]] inline c10::DimVector expand_option(const char* name, at::IntArrayRef numbers,
                                                  std::size_t dims, at::IntArrayRef otherwise) {
  const at::IntArrayRef from = numbers.empty() ? otherwise : numbers;
  TORCH_CHECK_VALUE(from.size() == 1 || from.size() == dims, name, " holds one number or ", dims,
                    ", one per dimension; got ", numbers);
  c10::DimVector expanded(from.begin(), from.end());
  expanded.resize(dims, from[0]);
  return expanded;
}

/// @throws c10::ValueError unless there are one to three.
inline void check_dims(const char* name, at::IntArrayRef numbers) {
  TORCH_CHECK_VALUE(!numbers.empty() && numbers.size() <= 3, name,
                    " holds one number for each of one, two or three dimensions; got ", numbers);
}

/// Whether torch would pool `input` in the order channels last. A batch of one-dimensional samples
/// counts as images of one row, as torch does it.
[[nodiscard]] inline bool is_channels_last(const at::Tensor& input, std::size_t dims) {
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

template <class Int>
using PoolSizes = c10::SmallVector<Int, c10::kDimVectorStaticSize>;

/// Strides of a dense tensor of these sizes in either order.
template <class Int>
[[nodiscard]] PoolSizes<Int> dense_strides(c10::ArrayRef<Int> sizes, bool channels_last) {
  PoolSizes<Int> strides(sizes.size(), Int(1));
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

/// A dense tensor in that order.
[[nodiscard]] inline at::Tensor empty_in_order(c10::SymIntArrayRef sizes, bool channels_last,
                                               const at::TensorOptions& options) {
  return at::empty_strided_symint(sizes, dense_strides(sizes, channels_last), options);
}
[[nodiscard]] inline at::Tensor empty_in_order(at::IntArrayRef sizes, bool channels_last,
                                               const at::TensorOptions& options) {
  return at::empty_strided(sizes, dense_strides(sizes, channels_last), options);
}

/// `input` dense in that order: itself or a copy.
[[nodiscard]] inline at::Tensor in_order(const at::Tensor& input, bool channels_last) {
  const auto strides = dense_strides(input.sizes(), channels_last);
  // Strides of dimensions of size 1 say nothing.
  bool fits = true;
  for (std::size_t i = 0; i < strides.size(); ++i) {
    fits = fits && (input.strides()[i] == strides[i] || input.sizes()[i] == 1);
  }
  return fits ? input : at::empty_strided(input.sizes(), strides, input.options()).copy_(input);
}

/// The geometry between these sizes (both with or both without the batch).
/// @param window none: the windows follow from the sizes
[[nodiscard]] inline PoolGeometry geometry_of(const std::optional<PoolWindow>& window,
                                              std::size_t dims, at::IntArrayRef input_sizes,
                                              at::IntArrayRef output_sizes, bool channels_last) {
  PoolGeometry geometry;
  const std::size_t first = input_sizes.size() - dims;
  geometry.batch = first == 2 ? input_sizes[0] : 1;
  geometry.channels = input_sizes[first - 1];
  geometry.channels_last = channels_last;
  for (std::size_t i = 0; i < dims; ++i) {
    const std::size_t to = 3 - dims + i;
    geometry.in[to] = input_sizes[first + i];
    geometry.out[to] = output_sizes[first + i];
    if (window) {
      geometry.kernel[to] = window->kernel_size()[i];
      geometry.stride[to] = window->stride()[i];
      geometry.padding[to] = window->padding()[i];
      geometry.dilation[to] = window->dilation()[i];
    }
  }
  return geometry;
}

/// Sizes of the output.
template <class Int>
[[nodiscard]] PoolSizes<Int> pooled_sizes(c10::ArrayRef<Int> input_sizes, const PoolWindow& window,
                                          bool ceil_mode) {
  PoolSizes<Int> sizes(input_sizes.begin(), input_sizes.end());
  const std::size_t first = sizes.size() - window.dims();
  for (std::size_t i = 0; i < window.dims(); ++i) {
    const Int& size = input_sizes[first + i];
    const std::int64_t stride = window.stride()[i];
    const std::int64_t padding = window.padding()[i];
    const std::int64_t reach = window.dilation()[i] * (window.kernel_size()[i] - 1) + 1;
    Int out = (size + (2 * padding - reach + (ceil_mode ? stride - 1 : 0))) / stride + 1;
    // A window begins inside the input or the padding before it.
    if (ceil_mode && (out - 1) * stride >= size + padding) {
      out = out - 1;
    }
    sizes[first + i] = std::move(out);
  }
  return sizes;
}

}  // namespace brim::nn
