#include "nn/ops/cuda_kernels.h"

#include <atomic>

#include "cuda_library.h"

namespace brim::nn {
namespace {

std::atomic<const CudaKernels*> registered{nullptr};

}  // namespace

const CudaKernels* cuda_kernels() {
  load_cuda_library();
  return registered.load();
}

void register_cuda_kernels(const CudaKernels& kernels) { registered.store(&kernels); }

}  // namespace brim::nn
