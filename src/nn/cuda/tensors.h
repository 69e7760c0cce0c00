#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "nn/autograd/optional_tensor.h"
#include "nn/cuda/bits.h"

// From tensors to the kernels, which know pointers only.

namespace brim::nn::cuda {

/// Launches on the current stream of the tensor's device: `work(stream)`, unless the tensor is
/// empty. @throws c10::AcceleratorError where the launch failed.
template <class Work>
void launch_on(const at::Tensor& tensor, const Work& work) {
  if (tensor.numel() == 0) {
    return;
  }
  const c10::cuda::CUDAGuard guard(tensor.device());
  work(c10::cuda::getCurrentCUDAStream().stream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

[[nodiscard]] inline const void* data_of(const MaybeTensor& tensor) {
  return is_given(tensor) ? tensor->const_data_ptr() : nullptr;
}

/// @throws c10::TypeError naming the operator for a type that no kernel knows.
inline Number number_of(const at::Tensor& tensor, const char* op) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return Number::float32;
    case at::kDouble:
      return Number::float64;
    case at::kHalf:
      return Number::float16;
    case at::kBFloat16:
      return Number::bfloat16;
    default:
      TORCH_CHECK_TYPE(false, op, " takes float32, float64, bfloat16 or float16, got ",
                       tensor.scalar_type());
  }
}

}  // namespace brim::nn::cuda
