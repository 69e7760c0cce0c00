#pragma once

#include <cstdint>

// No torch in here: the CUDA kernels include it too.

namespace brim::nn {

/// The most places a window may have for one byte to say which.
inline constexpr std::int64_t kMostPlaces = 256;

/// A pooling over depth, height and width; what a layer lacks of these has size and window 1.
struct PoolGeometry {
  std::int64_t batch = 1;
  std::int64_t channels = 1;
  std::int64_t in[3] = {1, 1, 1};
  std::int64_t out[3] = {1, 1, 1};
  std::int64_t kernel[3] = {1, 1, 1};
  std::int64_t stride[3] = {1, 1, 1};
  std::int64_t padding[3] = {0, 0, 0};
  std::int64_t dilation[3] = {1, 1, 1};
  bool channels_last = false;

  [[nodiscard]] constexpr std::int64_t planes() const { return batch * channels; }
  [[nodiscard]] constexpr std::int64_t in_size() const { return in[0] * in[1] * in[2]; }
  [[nodiscard]] constexpr std::int64_t out_size() const { return out[0] * out[1] * out[2]; }
  [[nodiscard]] constexpr std::int64_t places() const { return kernel[0] * kernel[1] * kernel[2]; }
};

/// How an average pooling divides.
struct AvgRule {
  bool adaptive = false;  // windows follow from the sizes; kernel, stride and padding mean nothing
  bool count_include_pad = true;
  std::int64_t divisor = 0;  // 0: the number of elements
};

}  // namespace brim::nn
