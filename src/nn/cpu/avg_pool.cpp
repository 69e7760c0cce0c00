#include <ATen/Dispatch.h>

#include <algorithm>

#include "nn/cpu/number.h"
#include "nn/ops/avg_pool_kernels.h"

namespace brim::nn::cpu {
namespace {

using Int = std::int64_t;

/// Where the window of output `o` lies along dimension `d`.
struct Window {
  Int begin, end;
  Int size;  // what it counts for in the divisor

  Window(const PoolGeometry& g, const AvgRule& rule, int d, Int o) {
    if (rule.adaptive) {
      begin = o * g.in[d] / g.out[d];
      end = ((o + 1) * g.in[d] + g.out[d] - 1) / g.out[d];
      size = end - begin;
      return;
    }
    begin = o * g.stride[d] - g.padding[d];
    end = std::min(begin + g.kernel[d], g.in[d] + g.padding[d]);
    size = end - begin;
    begin = std::max<Int>(begin, 0);
    end = std::min(end, g.in[d]);
    if (!rule.count_include_pad) {
      size = end - begin;
    }
  }
};

/// What each input of the window gets of a gradient, rounded as torch does.
template <class T>
T share_of(T grad, const AvgRule& rule, const Window& deep, const Window& high,
           const Window& wide) {
  if (rule.adaptive) {
    return grad / to<T>(deep.size) / to<T>(high.size) / to<T>(wide.size);
  }
  return grad / to<T>(rule.divisor != 0 ? rule.divisor : deep.size * high.size * wide.size);
}

/// Adds in the order of the outputs and in T, as torch does: the same bits.
template <class T>
void backward_typed(const T* grad, T* sums, const PoolGeometry& g, const AvgRule& rule) {
  const Int channels = g.channels_last ? g.channels : 1;  // of a place
  std::fill_n(sums, g.planes() * g.in_size(), T(0));
  for (Int plane = 0; plane < g.planes() / channels; ++plane) {
    for (Int od = 0; od < g.out[0]; ++od) {
      const Window deep(g, rule, 0, od);
      for (Int oh = 0; oh < g.out[1]; ++oh) {
        const Window high(g, rule, 1, oh);
        for (Int ow = 0; ow < g.out[2]; ++ow) {
          const Window wide(g, rule, 2, ow);
          for (Int c = 0; c < channels; ++c) {
            const T share = share_of(*grad++, rule, deep, high, wide);
            for (Int d = deep.begin; d < deep.end; ++d) {
              for (Int h = high.begin; h < high.end; ++h) {
                const Int row = ((plane * g.in[0] + d) * g.in[1] + h) * g.in[2];
                for (Int w = wide.begin; w < wide.end; ++w) {
                  sums[(row + w) * channels + c] += share;
                }
              }
            }
          }
        }
      }
    }
  }
}

}  // namespace

void avg_pool_backward(const at::Tensor& grad, at::Tensor& grad_input, const PoolGeometry& geometry,
                       const AvgRule& rule) {
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, grad.scalar_type(), "brim::avg_pool_backward", [&] {
        backward_typed(grad.const_data_ptr<scalar_t>(), grad_input.mutable_data_ptr<scalar_t>(),
                       geometry, rule);
      });
}

}  // namespace brim::nn::cpu
