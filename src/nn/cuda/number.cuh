#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "nn/cuda/bits.h"

// What a type calculates in on the device, as nn/number.h says it for the host.

namespace brim::nn::cuda {

template <class T>
struct Arithmetic {
  using Wide = T;
  static __device__ T widen(T x) { return x; }
  static __device__ T narrow(T x) { return x; }
};

template <>
struct Arithmetic<__half> {
  using Wide = float;
  static __device__ float widen(__half x) { return __half2float(x); }
  static __device__ __half narrow(float x) { return __float2half_rn(x); }
};

template <>
struct Arithmetic<__nv_bfloat16> {
  using Wide = float;
  static __device__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
  static __device__ __nv_bfloat16 narrow(float x) { return __float2bfloat16_rn(x); }
};

template <class T>
using Wide = typename Arithmetic<T>::Wide;

template <class T>
__device__ Wide<T> widen(T x) {
  return Arithmetic<T>::widen(x);
}

template <class T>
__device__ T narrow(Wide<T> x) {
  return Arithmetic<T>::narrow(x);
}

template <class T>
struct Type {
  using Element = T;
};

/// Calls run(Type<T>()) for types that calculate in float32.
template <class Run>
void with_float(Number type, const Run& run) {
  switch (type) {
    case Number::float32:
      return run(Type<float>());
    case Number::float16:
      return run(Type<__half>());
    case Number::bfloat16:
      return run(Type<__nv_bfloat16>());
    default:
      return;
  }
}

/// As with_float, and for float64.
template <class Run>
void with_type(Number type, const Run& run) {
  if (type == Number::float64) {
    return run(Type<double>());
  }
  with_float(type, run);
}

/// Calls run(Type<T>(), Type<P>()) for elements and what goes with them: of the same type, or
/// float32.
template <class Run>
void with_types(Number type, Number other, const Run& run) {
  with_type(type, [&](auto t) {
    if (other == type) {
      run(t, t);
    } else {
      run(t, Type<float>());
    }
  });
}

}  // namespace brim::nn::cuda
