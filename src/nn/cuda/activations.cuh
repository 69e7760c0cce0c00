#pragma once

#include <cmath>
#include <type_traits>

#include "nn/cuda/number.cuh"

// Activations on the device, with the bits of torch's kernels. Each has
//
//     T value(T x);
//     T grad(T grad, T x);
//
// torch's own activations calculate in a wider type and round once. Those that models write out are
// several operators: each result is rounded to the element's type, and no product is fused with a
// sum, because they were separate kernels. Inside of one of torch's kernels the compiler does fuse
// them, and so it does here: `times` and `plus` are for the others only.

namespace brim::nn::cuda {

// -- Arithmetic ----------------------------------------------------------------------------------

inline __device__ float times(float a, float b) { return __fmul_rn(a, b); }
inline __device__ double times(double a, double b) { return __dmul_rn(a, b); }
inline __device__ float plus(float a, float b) { return __fadd_rn(a, b); }
inline __device__ double plus(double a, double b) { return __dadd_rn(a, b); }

/// x as an operator that gives T would store it.
template <class T>
__device__ Wide<T> rounded(Wide<T> x) {
  return widen(narrow<T>(x));
}

template <class T>
__device__ Wide<T> product(Wide<T> a, Wide<T> b) {
  return rounded<T>(times(a, b));
}

template <class T>
__device__ Wide<T> sum(Wide<T> a, Wide<T> b) {
  return rounded<T>(plus(a, b));
}

template <class W>
__device__ W sigmoid_of(W x) {
  return W(1) / (W(1) + exp(-x));
}

/// grad * (1 - y * y) for y = tanh(x). In half types torch rounds every step.
template <class T>
__device__ Wide<T> tanh_grad(Wide<T> grad, Wide<T> y) {
  using W = Wide<T>;
  if constexpr (sizeof(T) == sizeof(W)) {
    return times(grad, W(1) - y * y);
  } else {
    return product<T>(grad, sum<T>(W(1), -product<T>(y, y)));
  }
}

/// grad * (1 - y) * y for y = sigmoid(x), every step rounded as above.
template <class T>
__device__ Wide<T> sigmoid_grad(Wide<T> grad, Wide<T> y) {
  return product<T>(product<T>(grad, sum<T>(Wide<T>(1), -y)), y);
}

// -- torch's own ---------------------------------------------------------------------------------

struct Silu {
  template <class T>
  static __device__ T value(T x) {
    const Wide<T> w = widen(x);
    return narrow<T>(w / (Wide<T>(1) + exp(-w)));
  }

  template <class T>
  static __device__ T grad(T grad, T x) {
    using W = Wide<T>;
    const W w = widen(x);
    const W s = sigmoid_of(w);
    return narrow<T>(widen(grad) * s * (W(1) + w * (W(1) - s)));
  }
};

struct Gelu {
  template <class T>
  static __device__ T value(T x) {
    using W = Wide<T>;
    const W w = widen(x);
    return narrow<T>(w * W(0.5) * (W(1) + erf(w * W(M_SQRT1_2))));
  }

  template <class T>
  static __device__ T grad(T grad, T x) {
    using W = Wide<T>;
    constexpr W kPeak = W(M_2_SQRTPI * M_SQRT1_2 * 0.5);  // of the density, 1 / sqrt(2 pi)
    const W w = widen(x);
    const W below = W(0.5) * (W(1) + erf(w * W(M_SQRT1_2)));
    const W density = exp(W(-0.5) * w * w) * kPeak;
    return narrow<T>(widen(grad) * (below + w * density));
  }
};

struct GeluTanh {
  template <class T>
  static __device__ T value(T x) {
    using W = Wide<T>;
    const W w = widen(x);
    return narrow<T>(W(0.5) * w * (W(1) + tanh(inner(w, w * w * w))));
  }

  template <class T>
  static __device__ T grad(T grad, T x) {
    using W = Wide<T>;
    const W w = widen(x);
    const W square = w * w;
    const W t = tanh(inner(w, square * w));
    const W of_left = W(0.5) * (W(1) + t);
    const W of_inner = kRoot<W> * (W(1) + W(3) * kCubic<W> * square);
    const W of_right = W(0.5) * w * (W(1) - t * t) * of_inner;
    return narrow<T>(widen(grad) * (of_left + of_right));
  }

 private:
  template <class W>
  static constexpr W kRoot = W(M_SQRT2 * M_2_SQRTPI * 0.5);
  template <class W>
  static constexpr W kCubic = W(0.044715);

  template <class W>
  static __device__ W inner(W x, W cube) {
    return kRoot<W> * (x + kCubic<W> * cube);
  }
};

struct Relu {
  template <class T>
  static __device__ T value(T x) {
    return widen(x) <= 0 ? T(0) : x;  // NaN stays
  }

  template <class T>
  static __device__ T grad(T grad, T x) {
    return widen(x) <= 0 ? T(0) : grad;
  }
};

struct Sigmoid {
  template <class T>
  static __device__ T value(T x) {
    return narrow<T>(sigmoid_of(widen(x)));
  }

  template <class T>
  static __device__ T grad(T grad, T x) {
    return narrow<T>(sigmoid_grad<T>(widen(grad), widen(value(x))));
  }
};

// -- Written out by models -----------------------------------------------------------------------

/// x * sigmoid(factor * x).
struct QuickGelu {
  double factor;

  template <class T>
  __device__ T value(T x) const {
    return narrow<T>(times(widen(x), gate(x)));
  }

  template <class T>
  __device__ T grad(T grad, T x) const {
    const Wide<T> g = widen(grad);
    const Wide<T> y = gate(x);
    const Wide<T> inner = sigmoid_grad<T>(product<T>(g, widen(x)), y);
    return narrow<T>(plus(product<T>(g, y), product<T>(inner, Wide<T>(factor))));
  }

 private:
  template <class T>
  __device__ Wide<T> gate(T x) const {
    return rounded<T>(sigmoid_of(product<T>(widen(x), Wide<T>(factor))));
  }
};

// The next two have powers, which autocast runs in float32: from there on values have the type P.

/// 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
struct NewGelu {
  template <class P, class T>
  static __device__ P value(T x) {
    const Wide<P> right = sum<P>(tanh_part<P>(x), Wide<P>(1));
    return narrow<P>(times(product<T>(widen(x), Wide<T>(0.5)), right));
  }

  template <class P, class T>
  static __device__ T grad(P grad, T x) {
    using W = Wide<P>;
    const W g = widen(grad);
    const W t = tanh_part<P>(x);
    const W half = product<T>(widen(x), Wide<T>(0.5));
    const W of_half = rounded<T>(product<P>(g, sum<P>(t, W(1))));
    const W of_sum = product<P>(tanh_grad<P>(product<P>(g, half), t), kRoot<W>);
    const W of_cube = product<P>(of_sum, W(0.044715));
    const W w = widen(x);
    const W of_power = product<P>(of_cube, product<P>(product<P>(w, w), W(3)));
    // In the order in which autograd adds them up.
    const W first = sum<T>(rounded<T>(of_sum), rounded<T>(of_power));
    return narrow<T>(plus(first, product<T>(of_half, W(0.5))));
  }

 private:
  template <class W>
  static constexpr W kRoot = static_cast<W>(0.7978845608028654);

  template <class P, class T>
  static __device__ Wide<P> tanh_part(T x) {
    using W = Wide<P>;
    const W w = widen(x);
    const W cube = product<P>(product<P>(w, w), w);
    const W inner = sum<P>(w, product<P>(cube, W(0.044715)));
    return rounded<P>(tanh(product<P>(inner, kRoot<W>)));
  }
};

/// relu(x)^2.
struct ReluSquared {
  template <class P, class T>
  static __device__ P value(T x) {
    const Wide<P> y = widen(Relu::value(x));
    return narrow<P>(times(y, y));
  }

  template <class P, class T>
  static __device__ T grad(P grad, T x) {
    const Wide<P> y = widen(Relu::value(x));
    const Wide<P> of_relu = product<P>(widen(grad), product<P>(y, Wide<P>(2)));
    return Relu::grad(narrow<T>(of_relu), x);
  }
};

template <class Activation>
inline constexpr bool kHasPowers =
    std::is_same_v<Activation, NewGelu> || std::is_same_v<Activation, ReluSquared>;

}  // namespace brim::nn::cuda
