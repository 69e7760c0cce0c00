#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <vector>

#include "nn/cpu/number.h"
#include "nn/cpu/widen.h"
#include "nn/ops/avg_pool.h"

namespace brim::nn::cpu {
namespace {

using Int = std::int64_t;

constexpr Int kGrain = 32768;  // values written; as much as ATen gives a thread at least

/// Where the window of an output lies along one dimension.
struct Window {
  Int begin, end;
  Int size;  // what it counts for in the divisor
};

using Windows = std::vector<Window>;

Windows windows_of(const PoolGeometry& g, const AvgRule& rule, int d) {
  Windows windows;
  windows.reserve(static_cast<std::size_t>(g.out[d]));
  for (Int o = 0; o < g.out[d]; ++o) {
    Window window{};
    if (rule.adaptive) {
      window.begin = o * g.in[d] / g.out[d];
      window.end = ((o + 1) * g.in[d] + g.out[d] - 1) / g.out[d];
    } else {
      window.begin = o * g.stride[d] - g.padding[d];
      window.end = std::min(window.begin + g.kernel[d], g.in[d] + g.padding[d]);
    }
    window.size = window.end - window.begin;
    window.begin = std::max<Int>(window.begin, 0);
    window.end = std::min(window.end, g.in[d]);
    if (!rule.count_include_pad) {
      window.size = window.end - window.begin;
    }
    windows.push_back(window);
  }
  return windows;
}

/// As many values as one step works on.
constexpr Int kStep = 16;
template <class T>
using Step = std::array<T, static_cast<std::size_t>(kStep)>;

/// What each input of a window gets of a gradient, rounded as torch rounds it: an adaptive pooling
/// divides by one size after the other.
template <class T>
class Share {
 public:
  Share(const AvgRule& rule, const Window& deep, const Window& high, const Window& wide)
      : adaptive_(rule.adaptive),
        by_(to<T>(rule.adaptive       ? deep.size
                  : rule.divisor != 0 ? rule.divisor
                                      : deep.size * high.size * wide.size)),
        high_(to<T>(high.size)),
        wide_(to<T>(wide.size)) {}

  T of(T grad) const { return adaptive_ ? grad / by_ / high_ / wide_ : grad / by_; }

  Step<Wide<T>> of(const Step<T>& grads) const {
    Step<Wide<T>> shares;
    widen<kStep>(grads.data(), shares.data());
    divide(shares, by_);
    if (adaptive_) {
      divide(shares, high_);
      divide(shares, wide_);
    }
    return shares;
  }

 private:
  static void divide(Step<Wide<T>>& values, T by) {
    for (Wide<T>& value : values) {
      value /= static_cast<Wide<T>>(by);
    }
    if constexpr (!std::is_same_v<T, Wide<T>>) {
      Step<T> rounded;
      narrow<kStep>(values.data(), rounded.data());
      widen<kStep>(rounded.data(), values.data());
    }
  }

  bool adaptive_;
  T by_;
  T high_;
  T wide_;
};

template <class T>
void add(const Step<Wide<T>>& shares, T* to) {
  Step<Wide<T>> sums;
  widen<kStep>(to, sums.data());
  for (std::size_t i = 0; i < sums.size(); ++i) {
    sums[i] += shares[i];
  }
  narrow<kStep>(sums.data(), to);
}

/// Adds the shares of one output's channels to those of every input in its row of the window.
template <class T>
void add_to_row(const Share<T>& share, const Window& wide, const T* grad, T* row, Int channels) {
  const Int whole = channels / kStep * kStep;
  Step<T> grads{};
  for (Int c = 0; c < whole; c += kStep) {
    std::memcpy(grads.data(), grad + c, sizeof(grads));
    const Step<Wide<T>> shares = share.of(grads);
    for (Int w = wide.begin; w < wide.end; ++w) {
      add(shares, row + w * channels + c);
    }
  }
  for (Int c = whole; c < channels; ++c) {
    const T one = share.of(grad[c]);
    for (Int w = wide.begin; w < wide.end; ++w) {
      row[w * channels + c] += one;
    }
  }
}

/// In the order of the outputs and in T, as torch adds: the same bits.
template <class T>
void backward_planes(const at::Tensor& grad, at::Tensor& grad_input, const PoolGeometry& g,
                     const AvgRule& rule, const std::array<Windows, 3>& windows) {
  const T* from = grad.const_data_ptr<T>();
  T* const to = grad_input.mutable_data_ptr<T>();
  const Int grain = std::max<Int>(1, kGrain / std::max<Int>(1, g.in_size()));
  at::parallel_for(0, g.planes(), grain, [&](Int begin, Int end) {
    std::memset(static_cast<void*>(to + begin * g.in_size()), 0,
                static_cast<std::size_t>((end - begin) * g.in_size()) * sizeof(T));
    for (Int plane = begin; plane < end; ++plane) {
      const T* now = from + plane * g.out_size();
      T* const sums = to + plane * g.in_size();
      for (const Window& deep : windows[0]) {
        for (const Window& high : windows[1]) {
          for (const Window& wide : windows[2]) {
            const T share = Share<T>(rule, deep, high, wide).of(*now++);
            for (Int d = deep.begin; d < deep.end; ++d) {
              for (Int h = high.begin; h < high.end; ++h) {
                T* const row = sums + (d * g.in[1] + h) * g.in[2];
                for (Int w = wide.begin; w < wide.end; ++w) {
                  row[w] += share;
                }
              }
            }
          }
        }
      }
    }
  });
}

/// Channels last: each row of the input takes from the windows over it, in the outputs' order.
template <class T>
void backward_pixels(const at::Tensor& grad, at::Tensor& grad_input, const PoolGeometry& g,
                     const AvgRule& rule, const std::array<Windows, 3>& windows) {
  const T* const from = grad.const_data_ptr<T>();
  T* const to = grad_input.mutable_data_ptr<T>();
  const Int row_size = g.in[2] * g.channels;
  const Int grain = std::max<Int>(1, kGrain / std::max<Int>(1, row_size));
  at::parallel_for(0, g.batch * g.in[0] * g.in[1], grain, [&](Int begin, Int end) {
    std::memset(static_cast<void*>(to + begin * row_size), 0,
                static_cast<std::size_t>((end - begin) * row_size) * sizeof(T));
    for (Int i = begin; i < end; ++i) {
      const Int n = i / g.in[1] / g.in[0];
      const Int d = i / g.in[1] % g.in[0];
      const Int h = i % g.in[1];
      const T* now = from + n * g.out_size() * g.channels;
      for (const Window& deep : windows[0]) {
        for (const Window& high : windows[1]) {
          if (d < deep.begin || d >= deep.end || h < high.begin || h >= high.end) {
            now += g.out[2] * g.channels;
            continue;
          }
          for (const Window& wide : windows[2]) {
            add_to_row(Share<T>(rule, deep, high, wide), wide, now, to + i * row_size, g.channels);
            now += g.channels;
          }
        }
      }
    }
  });
}

}  // namespace

void avg_pool_backward(const at::Tensor& grad, at::Tensor& grad_input, const PoolGeometry& geometry,
                       const AvgRule& rule) {
  const std::array<Windows, 3> windows = {
      windows_of(geometry, rule, 0), windows_of(geometry, rule, 1), windows_of(geometry, rule, 2)};
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, grad.scalar_type(), "brim::avg_pool_backward", [&] {
        (geometry.channels_last
             ? backward_pixels<scalar_t>
             : backward_planes<scalar_t>)(grad, grad_input, geometry, rule, windows);
      });
}

}  // namespace brim::nn::cpu
