#pragma once

#include <cuda_runtime_api.h>

#include "nn/cpu/channel_blocks.h"
#include "nn/cuda/bits.h"

// Normalisation on plain pointers; see nn/cuda/bits.h for what holds for all kernels.

namespace brim::nn::cuda {

/// out = in * weight * rsqrt(variance + eps), a factor a channel. In one launch.
/// @param params type of `weight` (null: none) and `variance`: `type`, or float32
void scale_channels(Number type, Number params, const void* in, const void* weight,
                    const void* variance, double eps, void* out, const ChannelBlocks& blocks,
                    cudaStream_t stream);

}  // namespace brim::nn::cuda
