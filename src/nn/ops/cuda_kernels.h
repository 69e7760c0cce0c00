#pragma once

#include <ATen/core/Tensor.h>
#include <brim/export.h>

#include <cstdint>
#include <tuple>

#include "nn/cpu/batch_norm.h"
#include "nn/cpu/channel_blocks.h"
#include "nn/ops/pool_geometry.h"

namespace brim::nn {

/// What libbrim_cuda brings for tensors on CUDA. Entries take the arguments of the operators of the
/// same name, checked, and run on the current stream of the tensor's device. An entry may be null.
struct CudaKernels {
  void (*max_pool_pack)(const at::Tensor& input, at::Tensor& output, at::Tensor& offsets,
                        const PoolGeometry& geometry) = nullptr;
  void (*max_pool_scatter)(const at::Tensor& grad, const at::Tensor& offsets,
                           at::Tensor& grad_input, const PoolGeometry& geometry) = nullptr;
  void (*max_pool_indices)(const at::Tensor& offsets, at::Tensor& indices,
                           const PoolGeometry& geometry) = nullptr;
  void (*avg_pool_backward)(const at::Tensor& grad, at::Tensor& grad_input,
                            const PoolGeometry& geometry, const AvgRule& rule) = nullptr;
  // The undefined tensor for no weight; the rest is dense.
  void (*scale_channels)(const at::Tensor& grad, const at::Tensor& weight,
                         const at::Tensor& running_var, double eps, at::Tensor& output,
                         const ChannelBlocks& blocks) = nullptr;
  // Tensors are contiguous in one memory format; `added` may be undefined.
  void (*normalise)(const NormOf& norm, std::int64_t formula, const at::Tensor& added, bool relu,
                    at::Tensor& output) = nullptr;
  std::tuple<at::Tensor, at::Tensor, at::Tensor> (*normalise_backward)(const NormOf& norm,
                                                                       const at::Tensor& grad,
                                                                       bool input_grad) = nullptr;
  /// Whether the current stream is recorded into a graph, so that nothing may be read back.
  bool (*is_capturing)() = nullptr;
};

/// Null where the kernels are not built: then ATen operators do the work.
const CudaKernels* cuda_kernels();

/// Called by libbrim_cuda when it is loaded.
BRIM_API void register_cuda_kernels(const CudaKernels& kernels);

}  // namespace brim::nn
