#pragma once

#include <ATen/cpu/vec/vec.h>

#include <type_traits>

#include "nn/cpu/number.h"

// Between a type and what it calculates in, for a fixed number of elements: loops of fixed length
// are vectorised whole.

namespace brim::nn::cpu {

template <std::size_t Count, class T>
void widen(const T* __restrict in, Wide<T>* __restrict out) {
  for (std::size_t i = 0; i < Count; ++i) {
    out[i] = static_cast<Wide<T>>(in[i]);
  }
}

template <std::size_t Count, class T>
void narrow(const Wide<T>* __restrict in, T* __restrict out) {
  if constexpr (std::is_same_v<T, at::Half>) {
    // Compilers vectorise the other conversions, not this one.
    using Floats = at::vec::Vectorized<float>;
    using Halves = at::vec::Vectorized<at::Half>;
    static_assert(Count % Halves::size() == 0);
    for (std::size_t i = 0; i < Count; i += Halves::size()) {
      at::vec::convert_from_float<at::Half>(Floats::loadu(in + i),
                                            Floats::loadu(in + i + Floats::size()))
          .store(out + i);
    }
  } else {
    for (std::size_t i = 0; i < Count; ++i) {
      out[i] = to<T>(in[i]);
    }
  }
}

}  // namespace brim::nn::cpu
