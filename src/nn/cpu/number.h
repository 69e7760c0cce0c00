#pragma once

#include <ATen/OpMathType.h>

namespace brim::nn {

/// What a type calculates in: float for the half-width types, else itself.
template <class T>
using Wide = at::opmath_type<T>;

// c10::Half's constructors narrow by themselves on ARM, so that no cast of ours can be explicit.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wfloat-conversion"

/// A number as T, by way of what T calculates in, as torch does.
template <class T, class Number>
[[nodiscard]] T to(Number value) {
  return static_cast<T>(static_cast<Wide<T>>(value));
}

#pragma GCC diagnostic pop

}  // namespace brim::nn
