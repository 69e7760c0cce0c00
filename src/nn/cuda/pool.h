#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "nn/cuda/bits.h"
#include "nn/ops/pool_geometry.h"

// Pooling on plain pointers; see nn/cuda/bits.h for what holds for all kernels. Everything is dense
// in the order that the geometry says. No atomics: backward is a sum over the windows that cover an
// element, in their order, so that it is the same in every run.

namespace brim::nn::cuda {

void max_pool_pack(Number type, const void* in, void* out, std::uint8_t* offsets,
                   const PoolGeometry& geometry, cudaStream_t stream);

void max_pool_scatter(Number type, const void* grad, const std::uint8_t* offsets, void* grad_input,
                      const PoolGeometry& geometry, cudaStream_t stream);

void avg_pool_backward(Number type, const void* grad, void* grad_input,
                       const PoolGeometry& geometry, const AvgRule& rule, cudaStream_t stream);

}  // namespace brim::nn::cuda
