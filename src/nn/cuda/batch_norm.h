#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "nn/cpu/channel_blocks.h"
#include "nn/cuda/bits.h"

// Batch normalisation on plain pointers; see nn/cuda/bits.h for what holds for all kernels.

namespace brim::nn::cuda {

/// What a channel is scaled and moved with. `weight` and `bias` may be null; all of type `params`,
/// which is the tensors' own or float32.
struct ChannelNorm {
  Number params;
  const void* weight;
  const void* bias;
  const void* mean;
  const void* spread;  // 1 / standard deviation, or the variance where eps >= 0
  double eps;          // below 0: `spread` is no variance
};

/// The parameters of a layer, one after the other. @param bytes of each
void copy_two(const void* one, const void* other, void* out, std::int64_t bytes,
              cudaStream_t stream);

/// The formula `in * weight * invstd`: the input's gradient with running statistics. `mean` and
/// `bias` are not read, `added` is null.
inline constexpr int kScale = 3;

/// out = norm(in) + added, below zero cut off if `relu`. Rounded to the type after each of the
/// steps, as separate operators would.
/// @param formula 0 to 2: one of the ways to round that cuDNN and torch use (see
///        ops/batch_norm_kernels.h), not for float64; or kScale
/// @param added null: none
void normalise(Number type, int formula, const ChannelNorm& norm, const void* in, const void* added,
               bool relu, void* out, const ChannelBlocks& blocks, cudaStream_t stream);

/// Parts that the sums over a channel are made of, for the buffer below.
std::int64_t parts_of(const ChannelBlocks& blocks);

/// The backward of normalisation with running statistics: all gradients in one pass over the
/// tensors. Sums are taken in a fixed order.
/// @param sums of the width that `type` calculates in, [parts][channels][2]
/// @param grad_in null: not wanted
/// @param grad_weight, grad_bias of the width that `type` calculates in
void normalise_backward(Number type, const ChannelNorm& norm, const void* grad, const void* in,
                        void* sums, void* grad_in, void* grad_weight, void* grad_bias,
                        const ChannelBlocks& blocks, cudaStream_t stream);

}  // namespace brim::nn::cuda
