#pragma once

#include <ATen/core/Tensor.h>
#include <brim/export.h>

#include <cstdint>
#include <tuple>

namespace brim::nn {

/// What libbrim_cuda brings for tensors on CUDA. Entries take the arguments of the operators of the
/// same name, checked, and run on the current stream of the tensor's device.
struct CudaKernels {
  void (*gate_pack)(const at::Tensor& input, at::Tensor& output, at::Tensor& bits,
                    std::int64_t gate, double a, double b);
  void (*pack_bits)(const at::Tensor& mask, at::Tensor& bits);
  void (*apply_bits)(const at::Tensor& input, const at::Tensor& bits, at::Tensor& output, double on,
                     double off);
};

/// Null where the kernels are not built: then ATen operators do the work.
const CudaKernels* cuda_kernels();

/// Called by libbrim_cuda when it is loaded.
BRIM_API void register_cuda_kernels(const CudaKernels& kernels);

}  // namespace brim::nn
