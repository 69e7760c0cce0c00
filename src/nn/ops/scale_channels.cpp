#include "nn/ops/scale_channels.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "nn/cpu/number.h"
#include "nn/ops/channels.h"
#include "nn/ops/cuda_kernels.h"

namespace brim::nn {
namespace {

constexpr std::int64_t kGrain = 32768;  // elements; as much as ATen gives a thread at least

at::Tensor dense_by_channels(const at::Tensor& grad) {
  return grad.contiguous(grad.suggest_memory_format());
}

/// T: of the gradient; P: of the statistics and the weight.
template <class T, class P>
void scale_loop(const at::Tensor& grad, const at::Tensor& weight, const at::Tensor& running_var,
                double eps, at::Tensor& output) {
  using W = Wide<T>;
  const ChannelBlocks blocks = blocks_of(grad);
  const auto count = static_cast<std::size_t>(blocks.channels);
  c10::SmallVector<W, 512> invstd(count);
  c10::SmallVector<W, 512> factor(count, W(1));
  const auto variances = running_var.accessor<P, 1>();
  for (std::int64_t c = 0; c < blocks.channels; ++c) {
    // As torch: worked out in double, and rounded once.
    invstd[static_cast<std::size_t>(c)] =
        static_cast<W>(1 / std::sqrt(static_cast<double>(variances[c]) + eps));
  }
  if (weight.defined()) {
    const auto weights = weight.accessor<P, 1>();
    for (std::int64_t c = 0; c < blocks.channels; ++c) {
      factor[static_cast<std::size_t>(c)] = static_cast<W>(weights[c]);
    }
  }
  const T* const in = grad.const_data_ptr<T>();
  T* const out = output.mutable_data_ptr<T>();
  if (blocks.inner == 1) {
    const std::int64_t grain = std::max<std::int64_t>(1, kGrain / blocks.channels);
    at::parallel_for(0, blocks.outer, grain, [&](std::int64_t begin, std::int64_t end) {
      const W* const first = invstd.data();
      const W* const second = factor.data();
      for (std::int64_t row = begin; row < end; ++row) {
        const T* const from = in + row * blocks.channels;
        T* const into = out + row * blocks.channels;
        for (std::int64_t c = 0; c < blocks.channels; ++c) {
          into[c] = to<T>(static_cast<W>(from[c]) * first[c] * second[c]);
        }
      }
    });
    return;
  }
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / blocks.inner);
  at::parallel_for(0, blocks.outer * blocks.channels, grain,
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t plane = begin; plane < end; ++plane) {
                       const auto c = static_cast<std::size_t>(plane % blocks.channels);
                       const W first = invstd[c];
                       const W second = factor[c];
                       const T* const from = in + plane * blocks.inner;
                       T* const into = out + plane * blocks.inner;
                       for (std::int64_t i = 0; i < blocks.inner; ++i) {
                         into[i] = to<T>(static_cast<W>(from[i]) * first * second);
                       }
                     }
                   });
}

at::Tensor scale_channels_cpu(const at::Tensor& grad, const MaybeTensor& weight,
                              const at::Tensor& running_var, double eps) {
  const at::Tensor source = dense_by_channels(grad);
  at::Tensor output = at::empty_like(source);
  if (source.numel() == 0) {
    return output;
  }
  const at::Tensor factors = is_given(weight) ? *weight : at::Tensor();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, source.scalar_type(), "brim::scale_channels", [&] {
        if (running_var.scalar_type() == source.scalar_type()) {
          scale_loop<scalar_t, scalar_t>(source, factors, running_var, eps, output);
        } else {
          scale_loop<scalar_t, float>(source, factors, running_var, eps, output);
        }
      });
  return output;
}

at::Tensor scale_channels_cuda(const at::Tensor& grad, const MaybeTensor& weight,
                               const at::Tensor& running_var, double eps) {
  const CudaKernels* const kernels = cuda_kernels();
  if (kernels == nullptr || kernels->scale_channels == nullptr) {
    return scale_channels_anywhere(grad, weight, running_var, eps);
  }
  const at::Tensor source = dense_by_channels(grad);
  at::Tensor output = at::empty_like(source);
  if (source.numel() != 0) {
    const at::Tensor factors = is_given(weight) ? weight->contiguous() : at::Tensor();
    kernels->scale_channels(source, factors, running_var.contiguous(), eps, output,
                            blocks_of(source));
  }
  return output;
}

at::Tensor scale_channels_meta(const at::Tensor& grad, const MaybeTensor&, const at::Tensor&,
                               double) {
  return at::empty_like(dense_by_channels(grad));
}

}  // namespace

at::Tensor scale_channels_anywhere(const at::Tensor& grad, const MaybeTensor& weight,
                                   const at::Tensor& running_var, double eps) {
  c10::SymDimVector shape(static_cast<std::size_t>(grad.dim()), 1);
  shape[1] = running_var.sym_size(0);
  const at::ScalarType type = grad.scalar_type();
  const at::ScalarType wide = at::toOpMathType(type);
  // As torch: worked out in double, and rounded once.
  const at::Tensor invstd = running_var.to(at::kDouble).add(eps).rsqrt().to(wide);
  at::Tensor result = grad.to(wide).mul(invstd.view_symint(shape));
  if (is_given(weight)) {
    result = result.mul(weight->to(wide).view_symint(shape));
  }
  return result.to(type);
}

at::Tensor scale_channels(const at::Tensor& grad, const MaybeTensor& weight,
                          const at::Tensor& running_var, double eps) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("brim::scale_channels", "")
          .typed<at::Tensor(const at::Tensor&, const MaybeTensor&, const at::Tensor&, double)>();
  return op.call(grad, weight, running_var, eps);
}

TORCH_LIBRARY_FRAGMENT(brim, m) {
  m.def("scale_channels(Tensor grad, Tensor? weight, Tensor running_var, float eps) -> Tensor",
        {at::Tag::needs_fixed_stride_order});
}

TORCH_LIBRARY_IMPL(brim, CPU, m) { m.impl("scale_channels", scale_channels_cpu); }

TORCH_LIBRARY_IMPL(brim, CUDA, m) { m.impl("scale_channels", scale_channels_cuda); }

TORCH_LIBRARY_IMPL(brim, Meta, m) { m.impl("scale_channels", scale_channels_meta); }

TORCH_LIBRARY_IMPL(brim, CompositeExplicitAutograd, m) {
  m.impl("scale_channels", scale_channels_anywhere);
}

}  // namespace brim::nn
