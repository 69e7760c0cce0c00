#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

// Activations whose derivative has two values, as the kernels of all devices calculate them: they
// write the value and the bit in one pass. No torch in here: the CUDA kernels include it too.
//
// W is the type that the elements calculate in. X is W itself on CUDA, and on the CPU one of the
// compilers' vectors of W, whose comparisons give masks. What is written here must mean the same
// for both: comparisons, `!`, `&&`, `||`, and `? :`. `X{} + 6` is a 6 of either type.

namespace brim::nn::bitmask {

template <class W>
struct Relu {
  /// Whether the bit is set. NaN passes, as in torch.
  template <class X>
  constexpr auto passes(X x) const {
    return !(x <= 0);
  }

  template <class X, class Mask>
  constexpr X value(X x, Mask passes) const {
    return passes ? x : X{};
  }
};

/// The value is rounded to the element's type afterwards. The comparisons are not, as in torch.
template <class W>
struct Hardtanh {
  W lower;
  W upper;

  template <class X>
  constexpr auto passes(X x) const {
    return !(x <= lower || x >= upper);
  }

  template <class X, class Mask>
  constexpr X value(X x, Mask passes) const {
    return passes ? x : x <= lower ? X{} + lower : X{} + upper;
  }
};

template <class W>
struct LeakyRelu {
  W slope;

  template <class X>
  constexpr auto passes(X x) const {
    return x > 0;
  }

  template <class X, class Mask>
  constexpr X value(X x, Mask passes) const {
    return passes ? x : x * slope;
  }
};

template <class W>
struct Hardsigmoid {
  template <class X>
  constexpr auto passes(X x) const {
    return x > -3 && x < 3;
  }

  template <class X, class Mask>
  constexpr X value(X x, Mask /*passes*/) const {
    x = x + 3;
    x = x < 0 ? X{} : x;
    x = x > 6 ? X{} + 6 : x;
    if constexpr (std::is_same_v<X, W>) {  // as torch's kernel on CUDA
      return x * static_cast<W>(1.0F / 6.0F);
    } else {
      return x / 6;
    }
  }
};

/// The input above a threshold, else another value. NaN passes, as in torch.
template <class W>
struct Threshold {
  W threshold;
  W other;

  template <class X>
  constexpr auto passes(X x) const {
    return !(x <= threshold);
  }

  template <class X, class Mask>
  constexpr X value(X x, Mask passes) const {
    return passes ? x : X{} + other;
  }
};

/// Calls run(function) with the activation of this name.
/// @param name as in the operators' schemas
/// @param a, b its options, in the order of its members
/// @tparam Bound what torch's kernel of this device rounds a threshold to
/// @throws std::invalid_argument for another name.
template <class W, class Bound = W, class Run>
void with_function(std::string_view name, double a, double b, const Run& run) {
  if (name == "relu") {
    run(Relu<W>{});
  } else if (name == "hardtanh") {
    run(Hardtanh<W>{static_cast<W>(a), static_cast<W>(b)});
  } else if (name == "leaky_relu") {
    run(LeakyRelu<W>{static_cast<W>(a)});
  } else if (name == "hardsigmoid") {
    run(Hardsigmoid<W>{});
  } else if (name == "threshold") {
    run(Threshold<W>{static_cast<W>(static_cast<Bound>(static_cast<W>(a))), static_cast<W>(b)});
  } else {
    throw std::invalid_argument("unknown bitmask activation: " + std::string(name));
  }
}

}  // namespace brim::nn::bitmask
