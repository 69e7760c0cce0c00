#include "nn/ops/batch_norm_kernels.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/native_batch_norm_backward.h>

#include <cmath>
#include <map>
#include <mutex>
#include <vector>

#include "fork.h"
#include "nn/autograd/node.h"
#include "nn/autograd/operator.h"
#include "nn/cpu/grain.h"
#include "nn/cpu/number.h"

namespace brim::nn {
namespace {

// -- Operators for which libbrim_cuda has kernels ------------------------------------------------

at::Tensor no_normalise(const at::Tensor&, const MaybeTensor&, const MaybeTensor&,
                        const at::Tensor&, const at::Tensor&, double, std::int64_t,
                        const MaybeTensor&, bool) {
  return {};
}

/// @param formula see nn/cuda/batch_norm.h
/// @returns undefined without libbrim_cuda
const Operator<no_normalise> kNormalise(
    "batch_norm_normalise(Tensor input, Tensor? weight, Tensor? bias, Tensor mean, Tensor spread, "
    "float eps, int formula, Tensor? added, bool relu) -> Tensor");

bool no_answer(const at::Tensor&) { return true; }

/// Whether the current stream is recorded into a graph, so that nothing may be read back.
const Operator<no_answer> kIsCapturing("is_capturing(Tensor of) -> bool");

NormGrads eval_backward_anywhere(const at::Tensor& grad, const at::Tensor& input,
                                 const MaybeTensor& weight, const at::Tensor& running_mean,
                                 const at::Tensor& running_var, double eps,
                                 std::array<bool, 3> wanted) {
  // Forward gives empty ones in eval mode; undefined ones are an error on CUDA.
  const at::Tensor none = at::empty({0}, running_mean.options());
  return at::native_batch_norm_backward(grad, input, weight, running_mean, running_var, none, none,
                                        false, eps, wanted);
}

const Operator<eval_backward_anywhere> kEvalBackward(
    "batch_norm_eval_backward(Tensor grad, Tensor input, Tensor? weight, Tensor running_mean, "
    "Tensor running_var, float eps, bool[3] wanted) -> (Tensor, Tensor, Tensor)");

// -- Which way to round ------------------------------------------------------------------------

constexpr std::int64_t kFormulas = 3;  // of the kernel `normalise`
constexpr std::int64_t kNone = -1;

// So few elements could agree by chance, and are cheap without a kernel of their own.
constexpr std::int64_t kFewElements = 4096;

using Key = std::vector<std::int64_t>;

/// All that cuDNN may choose by.
Key key_of(const NormOf& norm) {
  const at::Tensor& input = norm.input;
  Key key = {static_cast<std::int64_t>(input.scalar_type()),
             static_cast<std::int64_t>(norm.mean.scalar_type()),
             is_given(norm.weight) ? 1 : 0,
             is_given(norm.bias) ? 1 : 0,
             norm.eps >= 0 ? 1 : 0,
             input.device().index(),
             input.dim()};
  key.insert(key.end(), input.sizes().begin(), input.sizes().end());
  key.insert(key.end(), input.strides().begin(), input.strides().end());
  return key;
}

struct Formulas {
  std::optional<std::int64_t> find(const Key& key) {
    const std::lock_guard lock(mutex);
    const auto place = known.find(key);
    return place == known.end() ? std::nullopt : std::optional(place->second);
  }

  void remember(Key key, std::int64_t formula) {
    const std::lock_guard lock(mutex);
    known[std::move(key)] = formula;
  }

  std::mutex mutex;
  std::map<Key, std::int64_t> known;
};

Formulas& formulas() { return shared_object<Formulas>(); }

bool same_type(const MaybeTensor& tensor, const at::Tensor& as) {
  return !is_given(tensor) || tensor->scalar_type() == as.scalar_type();
}

/// Whether the kernels know this mix of types: parameters of the input's type or float32.
bool types_fit(const at::Tensor& input, const at::Tensor& mean, const at::Tensor& spread,
               const MaybeTensor& weight, const MaybeTensor& bias) {
  return (mean.scalar_type() == input.scalar_type() || mean.scalar_type() == at::kFloat) &&
         same_type(spread, mean) && same_type(weight, mean) && same_type(bias, mean);
}

bool kernel_can(const NormOf& norm) {
  const at::Tensor& input = norm.input;
  return input.is_cuda() && input.numel() >= kFewElements && input.scalar_type() != at::kDouble &&
         input.is_contiguous(input.suggest_memory_format()) && norm.mean.is_contiguous() &&
         norm.spread.is_contiguous() &&
         types_fit(input, norm.mean, norm.spread, norm.weight, norm.bias);
}

at::Tensor run_kernel(const NormOf& norm, std::int64_t formula, const at::Tensor& added,
                      bool relu) {
  return kNormalise(norm.input, norm.weight, norm.bias, norm.mean, norm.spread, norm.eps, formula,
                    maybe(added), relu);
}

/// Runs torch's forward and the kernel's ways beside it.
std::int64_t find_out(const NormOf& norm, const Key& key, const at::Tensor& reference) {
  if (reference.strides() != norm.input.strides()) {
    return kNone;
  }
  for (std::int64_t formula = 0; formula < kFormulas; ++formula) {
    if (at::equal(run_kernel(norm, formula, {}, false), reference)) {
      formulas().remember(key, formula);
      return formula;
    }
  }
  if (!at::isnan(reference).any().item<bool>()) {  // NaN equals nothing: try again another time
    formulas().remember(key, kNone);
  }
  return kNone;
}

// -- One factor per channel ----------------------------------------------------------------------

at::Tensor dense_by_channels(const at::Tensor& grad) {
  return grad.contiguous(grad.suggest_memory_format());
}

/// T: of the gradient; P: of the statistics and the weight.
template <class T, class P>
void scale_loop(const at::Tensor& grad, const MaybeTensor& weight, const at::Tensor& running_var,
                double eps, at::Tensor& output) {
  using W = Wide<T>;
  const ChannelBlocks blocks = blocks_of(grad);
  const auto count = static_cast<std::size_t>(blocks.channels);
  c10::SmallVector<W, 512> invstd(count);
  c10::SmallVector<W, 512> factor(count, W(1));
  const auto variances = running_var.accessor<P, 1>();
  for (std::size_t c = 0; c < count; ++c) {
    // As torch: computed in double, and rounded once.
    const auto variance = static_cast<double>(variances[static_cast<std::int64_t>(c)]);
    invstd[c] = static_cast<W>(1 / std::sqrt(variance + eps));
    if (is_given(weight)) {
      factor[c] = static_cast<W>(weight->accessor<P, 1>()[static_cast<std::int64_t>(c)]);
    }
  }
  const T* const in = grad.const_data_ptr<T>();
  T* const out = output.mutable_data_ptr<T>();
  // A row is all channels of a place, or all places of a channel.
  const bool channels_last = blocks.inner == 1;
  const std::int64_t rows = channels_last ? blocks.outer : blocks.outer * blocks.channels;
  const std::int64_t size = channels_last ? blocks.channels : blocks.inner;
  at::parallel_for(0, rows, grain_of(size), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const T* const from = in + row * size;
      T* const into = out + row * size;
      if (channels_last) {
        const W* const first = invstd.data();
        const W* const second = factor.data();
        for (std::int64_t i = 0; i < size; ++i) {
          into[i] = to<T>(static_cast<W>(from[i]) * first[i] * second[i]);
        }
      } else {
        const auto c = static_cast<std::size_t>(row % blocks.channels);
        const W first = invstd[c];
        const W second = factor[c];
        for (std::int64_t i = 0; i < size; ++i) {
          into[i] = to<T>(static_cast<W>(from[i]) * first * second);
        }
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
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, source.scalar_type(), "brim::scale_channels", [&] {
        if (running_var.scalar_type() == source.scalar_type()) {
          scale_loop<scalar_t, scalar_t>(source, weight, running_var, eps, output);
        } else {
          scale_loop<scalar_t, float>(source, weight, running_var, eps, output);
        }
      });
  return output;
}

at::Tensor scale_channels_meta(const at::Tensor& grad, const MaybeTensor&, const at::Tensor&,
                               double) {
  return at::empty_like(dense_by_channels(grad));
}

/// Any device, and differentiable.
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

const Operator<scale_channels_anywhere> kScaleChannels(
    "scale_channels(Tensor grad, Tensor? weight, Tensor running_var, float eps) -> Tensor",
    {.cpu = scale_channels_cpu, .meta = scale_channels_meta}, {at::Tag::needs_fixed_stride_order});

}  // namespace

std::optional<at::Tensor> batch_norm_again(const NormOf& norm, const at::Tensor& added, bool relu,
                                           const std::function<at::Tensor()>& reference) {
  if (!kernel_can(norm) || (added.defined() && (added.strides() != norm.input.strides() ||
                                                added.scalar_type() != norm.input.scalar_type()))) {
    return std::nullopt;
  }
  const Key key = key_of(norm);
  std::optional<std::int64_t> formula = formulas().find(key);
  if (!formula) {
    if (kIsCapturing(norm.input)) {
      return std::nullopt;  // the answer could not be read
    }
    formula = find_out(norm, key, reference());
  }
  return *formula == kNone ? std::nullopt : std::optional(run_kernel(norm, *formula, added, relu));
}

NormGrads batch_norm_eval_backward(const at::Tensor& grad, const at::Tensor& input,
                                   const MaybeTensor& weight, const at::Tensor& running_mean,
                                   const at::Tensor& running_var, double eps,
                                   std::array<bool, 3> wanted) {
  const bool fits = input.numel() > 0 && grad.scalar_type() == input.scalar_type() &&
                    types_fit(input, running_mean, running_var, weight, {});
  return fits ? kEvalBackward(grad, input, weight, running_mean, running_var, eps, wanted)
              : eval_backward_anywhere(grad, input, weight, running_mean, running_var, eps, wanted);
}

at::Tensor scale_channels(const at::Tensor& grad, const MaybeTensor& weight,
                          const at::Tensor& running_var, double eps) {
  return at::GradMode::is_enabled() || is_traced(grad)
             ? scale_channels_anywhere(grad, weight, running_var, eps)
             : kScaleChannels(grad, weight, running_var, eps);
}

}  // namespace brim::nn
