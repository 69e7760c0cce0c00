#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string_view>

// The kernels over bits (see nn/ops/bits.h) on plain pointers: .cu files take no header of torch,
// so that they compile in seconds. `n` counts elements. Pointers need no alignment beyond their
// type's. Kernels run on `stream`; the caller sets the device and checks for errors of the launch.

namespace brim::nn::cuda {

/// Types of elements that the kernels know.
enum class Number : std::uint8_t { byte, float32, float64, float16, bfloat16 };

/// `out` may be `in`. All but byte.
void bitmask_pack(Number type, const void* in, void* out, std::uint8_t* bits, std::int64_t n,
                  std::string_view name, double a, double b, cudaStream_t stream);

/// byte serves bool too.
void pack_bits(Number type, const void* mask, std::uint8_t* bits, std::int64_t n,
               cudaStream_t stream);

/// All but byte.
void apply_bits(Number type, const void* in, const std::uint8_t* bits, void* out, std::int64_t n,
                double on, double off, cudaStream_t stream);

}  // namespace brim::nn::cuda
