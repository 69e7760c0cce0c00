#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "nn/cpu/channel_blocks.h"

// What the normalisations share.

namespace brim::nn {

/// Gradients of input, weight and bias.
using NormGrads = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

/// How the channels (dimension 1) of a tensor lie that is contiguous in its own memory format.
[[nodiscard]] inline ChannelBlocks blocks_of(const at::Tensor& dense) {
  const std::int64_t channels = dense.size(1);
  if (dense.is_contiguous()) {
    const std::int64_t outer = dense.size(0);
    return {outer, channels, dense.numel() / (outer * channels)};
  }
  return {dense.numel() / channels, channels, 1};
}

/// The sum over `dims`, the first dimension among them, in another type. In parts where torch would
/// copy all of a low precision tensor to float32 first.
[[nodiscard]] at::Tensor sum_in_parts(const at::Tensor& tensor, at::IntArrayRef dims,
                                      at::ScalarType type);

/// The sum over every dimension but the channels', in another type.
[[nodiscard]] inline at::Tensor sum_over_channels(const at::Tensor& grad, at::ScalarType type) {
  c10::DimVector dims{0};
  for (std::int64_t i = 2; i < grad.dim(); ++i) {
    dims.push_back(i);
  }
  return sum_in_parts(grad, dims, type);
}

/// The sum over every dimension but the last `dims`, in another type.
[[nodiscard]] inline at::Tensor sum_over_rows(const at::Tensor& grad, std::int64_t dims,
                                              at::ScalarType type) {
  c10::DimVector rows;
  for (std::int64_t i = 0; i < grad.dim() - dims; ++i) {
    rows.push_back(i);
  }
  // Summing over no dimension would mean all of them.
  return rows.empty() ? grad.to(type) : sum_in_parts(grad, rows, type);
}

}  // namespace brim::nn
