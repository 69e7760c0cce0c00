#include "memory/cuda_allocator.h"

#include <brim/memory/bytes.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/util/Exception.h>

#include <string>
#include <utility>

#include "memory/reclaim.h"

namespace brim {

bool CudaAllocator::is_capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

CudaAllocator* CudaAllocator::install() {
  static CudaAllocator* const installed = []() -> CudaAllocator* {
    caching::CUDAAllocator* const torchs = caching::get();
    if (torchs->name() != "native" && torchs->name() != "cudaMallocAsync") {
      return nullptr;
    }
    auto* const made = new CudaAllocator(*torchs);  // never destroyed: blocks may outlive all else
    caching::allocator.store(made);
    return made;
  }();
  return installed;
}

template <class Allocate>
auto CudaAllocator::allocate_or_reclaim(std::size_t bytes, const Allocate& allocate) {
  while (true) {
    try {
      TORCH_CHECK_WITH(OutOfMemoryError, bytes == 0 || gates_.admit(bytes),
                       "CUDA out of memory. Tried to allocate ",
                       format_bytes(static_cast<std::int64_t>(bytes)),
                       ": this failure was injected by brim::testing::OomInjector");
      return allocate();
    } catch (c10::OutOfMemoryError& error) {
      const c10::Device device(c10::DeviceType::CUDA, c10::cuda::current_device());
      if (is_capturing() || !reclaimed(device, static_cast<std::int64_t>(bytes))) {
        if (std::string told = given_up(device); !told.empty()) {
          error.add_context(std::move(told));
        }
        throw;
      }
    }
  }
}

c10::DataPtr CudaAllocator::allocate(std::size_t bytes) {
  return allocate_or_reclaim(bytes, [&] { return next_.allocate(bytes); });
}

void* CudaAllocator::raw_alloc(std::size_t bytes) {
  return allocate_or_reclaim(bytes, [&] { return next_.raw_alloc(bytes); });
}

void* CudaAllocator::raw_alloc_with_stream(std::size_t bytes, cudaStream_t stream) {
  return allocate_or_reclaim(bytes, [&] { return next_.raw_alloc_with_stream(bytes, stream); });
}

}  // namespace brim
