// What torch's operators are in a region: one line per operator.

#include <ATen/Operators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/constant_pad_nd.h>
#include <brim/nn/functional.h>
#include <brim/nn/losses.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/DimVector.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <string>
#include <tuple>
#include <type_traits>

#include "nn/autograd/node.h"
#include "nn/ops/attention.h"
#include "nn/ops/pad.h"
#include "nn/region/region.h"

namespace brim::nn {
namespace redirections {  // of torch's names, which other files have too
namespace {

namespace fn = functional;
namespace ops = at::_ops;
using at::IntArrayRef;
using at::Scalar;
using at::Tensor;
using Maybe = std::optional<Tensor>;  // a result, or nothing: torch's own runs
using Optional = const std::optional<Tensor>&;
using Ints = c10::SymIntArrayRef;

// -- How an operator is redirected ---------------------------------------------------------------

bool needs(const Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); }
bool needs(Optional tensor) { return tensor && needs(*tensor); }
template <class Option>
bool needs(const Option& /*option*/) {
  return false;
}

/// The kernel of one of torch's operators for the key of regions.
/// @tparam Op torch's operator, a struct of at::_ops
/// @tparam Own takes its arguments and gives the same result, or nothing where torch's should run
template <class Op, auto Own, class Schema = typename Op::schema>
struct Redirected;

template <class Op, auto Own, class Result, class... Args>
struct Redirected<Op, Own, Result(Args...)> {
  static Result call(c10::DispatchKeySet keys, Args... args) {
    if (at::GradMode::is_enabled() && (needs(args) || ...) &&
        !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradOther) &&
        is_redirected(std::get<0>(std::tie(args...)))) {
      const c10::impl::ExcludeDispatchKeyGuard outside(kRegionKey);
      // NOLINTNEXTLINE(misc-const-correctness): it is moved from where it is returned
      if (auto result = Own(args...)) {
        if constexpr (std::is_reference_v<Result>) {
          return std::get<0>(std::tie(args...));
        } else {
          return *std::move(result);
        }
      }
    }
    constexpr c10::DispatchKeySet kBelow(c10::DispatchKeySet::FULL_AFTER, kRegionKey);
    return Op::redispatch(keys & kBelow, std::forward<Args>(args)...);
  }
};

template <class Op, auto Own>
void redirect(torch::Library& library) {
  const std::string overload = Op::overload_name;
  library.impl((Op::name + (overload.empty() ? "" : "." + overload)).c_str(),
               TORCH_FN((Redirected<Op, Own>::call)));
}

Again asks() {
  const Recompute level = recompute_here();
  return level == Recompute::automatic ? Again(Again::kIfShort)
                                       : Again(level != Recompute::nothing);
}
bool runs_again() { return recompute_here() >= Recompute::products; }

// -- Options as brim's functions take them -------------------------------------------------------

using Numbers = c10::DimVector;

/// One number per dimension out of one, or as many; none stay none.
Numbers each(IntArrayRef values, std::size_t dims) {
  return values.size() == 1 ? Numbers(dims, values[0]) : Numbers(values);
}

template <std::size_t Dims>
Maybe conv(const Tensor& x, const Tensor& w, Optional b, Ints stride, Ints padding, Ints dilation,
           const c10::SymInt& groups) {
  const auto steps = c10::asIntArrayRefSlowOpt(stride);
  const auto pads = c10::asIntArrayRefSlowOpt(padding);
  const auto gaps = c10::asIntArrayRefSlowOpt(dilation);
  const auto parts = groups.maybe_as_int();
  if (!steps || !pads || !gaps || !parts || w.dim() != Dims + 2) {
    return {};
  }
  return fn::conv(x, w, b, *steps, *pads, *gaps, *parts, asks(), runs_again());
}

/// Padding by name. What is odd in it goes to the right.
template <std::size_t Dims>
Maybe conv_named(const Tensor& x, const Tensor& w, Optional b, Ints stride,
                 c10::string_view padding, Ints dilation, const c10::SymInt& groups) {
  const auto gaps = c10::asIntArrayRefSlowOpt(dilation);
  const bool is_same = padding == "same";
  const auto is_one = [](const c10::SymInt& step) { return step == 1; };
  if ((!is_same && padding != "valid") || !gaps || w.dim() != Dims + 2 ||
      (is_same && !std::ranges::all_of(stride, is_one))) {
    return {};  // also for torch's error
  }
  const Numbers steps = each(*gaps, Dims);
  std::array<c10::SymInt, Dims> pads;
  std::array<std::int64_t, 2 * Dims> right{};
  for (std::size_t i = 0; i < Dims && is_same; ++i) {
    const auto size = w.sym_size(static_cast<std::int64_t>(i) + 2).maybe_as_int();
    if (!size) {
      return {};
    }
    const std::int64_t total = steps[i] * (*size - 1);
    pads[i] = total / 2;
    right[2 * (Dims - 1 - i) + 1] = total % 2;
  }
  const bool is_odd = std::ranges::count(right, 1) != 0;
  return conv<Dims>(is_odd ? at::constant_pad_nd(x, right) : x, w, b, stride, pads, dilation,
                    groups);
}

template <std::size_t Dims>
Maybe conv_transpose(const Tensor& x, const Tensor& w, Optional b, Ints stride, Ints padding,
                     Ints output_padding, const c10::SymInt& groups, Ints dilation) {
  const auto steps = c10::asIntArrayRefSlowOpt(stride);
  const auto pads = c10::asIntArrayRefSlowOpt(padding);
  const auto more = c10::asIntArrayRefSlowOpt(output_padding);
  const auto gaps = c10::asIntArrayRefSlowOpt(dilation);
  const auto parts = groups.maybe_as_int();
  if (!steps || !pads || !more || !gaps || !parts || w.dim() != Dims + 2) {
    return {};
  }
  return fn::conv_transpose(x, w, b, *steps, *pads, *more, *parts, *gaps, asks(), runs_again());
}

template <std::size_t Dims>
Maybe max_pool(const Tensor& x, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
               IntArrayRef dilation, bool ceil_mode) {
  return fn::max_pool(x, each(kernel, Dims), stride, padding, dilation, ceil_mode);
}

template <std::size_t Dims>
std::optional<std::tuple<Tensor, Tensor>> max_pool_with_indices(const Tensor& x, IntArrayRef kernel,
                                                                IntArrayRef stride,
                                                                IntArrayRef padding,
                                                                IntArrayRef dilation,
                                                                bool ceil_mode) {
  return fn::max_pool_with_indices(x, each(kernel, Dims), stride, padding, dilation, ceil_mode);
}

template <std::size_t Dims>
Maybe avg_pool(const Tensor& x, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
               bool ceil_mode, bool count_include_pad, std::optional<std::int64_t> divisor) {
  return fn::avg_pool(x, each(kernel, Dims), stride, padding, ceil_mode, count_include_pad,
                      divisor);
}

Maybe avg_pool1d(const Tensor& x, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                 bool ceil_mode, bool count_include_pad) {
  return avg_pool<1>(x, kernel, stride, padding, ceil_mode, count_include_pad, {});
}

/// To one value torch takes the mean, whose backward keeps nothing.
Maybe adaptive_avg_pool_to(const Tensor& x, IntArrayRef sizes) {
  const bool to_one = std::ranges::count(sizes, 1) == std::ssize(sizes);
  return to_one ? Maybe() : Maybe(fn::adaptive_avg_pool(x, sizes));
}

template <std::size_t Dims>
Maybe adaptive_avg_pool(const Tensor& x, Ints output_size) {
  const auto sizes = c10::asIntArrayRefSlowOpt(output_size);
  return sizes ? adaptive_avg_pool_to(x, each(*sizes, Dims)) : Maybe();
}

Maybe adaptive_avg_pool1d(const Tensor& x, IntArrayRef output_size) {
  return adaptive_avg_pool_to(x, output_size);
}

/// Of other modes torch keeps nothing.
Maybe pad_by(const Tensor& x, Ints padding, c10::string_view mode) {
  const auto pads = c10::asIntArrayRefSlowOpt(padding);
  const bool keeps = mode == "reflect" || mode == "replicate";
  return pads && keeps ? Maybe(nn::pad(x, *pads, mode)) : Maybe();
}

Maybe pad_enum(const Tensor& x, Ints padding, std::int64_t mode, std::optional<double> /*value*/) {
  constexpr std::array kModes = {"reflect", "replicate", "circular",
                                 "constant"};  // at::padding_mode
  return pad_by(x, padding, kModes[static_cast<std::size_t>(mode)]);
}

Maybe pad(const Tensor& x, Ints padding, c10::string_view mode, std::optional<double> /*value*/) {
  return pad_by(x, padding, mode);
}

bool is_number(const Tensor& tensor) { return tensor.unsafeGetTensorImpl()->is_wrapped_number(); }

bool is_ours(const Tensor& tensor) {
  return dynamic_cast<const SavingNode*>(tensor.grad_fn().get()) != nullptr;
}

/// Where nobody asks, a product keeps what torch's keeps. It only tells the layers that made the
/// factors that they are kept. Where layers ask, a product with one factor that needs no gradient
/// (noise) is a link too.
Maybe mul(const Tensor& x, const Tensor& y) {
  const bool tells = x.requires_grad() && y.requires_grad() && (is_ours(x) || is_ours(y));
  const bool counts = (asks() != 0 || tells) && !is_number(x) && !is_number(y);
  return counts ? Maybe(fn::mul(x, y, asks())) : Maybe();
}

/// torch keeps nothing of a sum itself.
template <bool InPlace>
Maybe add(const Tensor& x, const Tensor& y, const Scalar& alpha) {
  const bool counts = asks() != 0 && !is_number(x) && !is_number(y) && alpha.equal(1);
  return counts ? Maybe(fn::add(x, y, InPlace)) : Maybe();
}

template <bool InPlace>
Maybe dropout(const Tensor& x, double p, bool train) {
  return train && p >= 0 && p <= 1 ? Maybe(fn::dropout(x, p, true, InPlace)) : Maybe();
}

template <bool InPlace>
Maybe elu(const Tensor& x, const Scalar& alpha, const Scalar& scale, const Scalar& input_scale) {
  const bool is_usual = scale.equal(1) && input_scale.equal(1);
  return is_usual ? Maybe(fn::elu(x, alpha.toDouble(), InPlace, asks())) : Maybe();
}

template <bool InPlace>
Maybe hardtanh(const Tensor& x, const Scalar& least, const Scalar& most) {
  const bool is_usual = least.toDouble() <= most.toDouble();  // else torch's error
  return is_usual ? Maybe(fn::hardtanh(x, least.toDouble(), most.toDouble(), InPlace, asks()))
                  : Maybe();
}

template <bool InPlace>
Maybe leaky_relu(const Tensor& x, const Scalar& slope) {
  return fn::leaky_relu(x, slope.toDouble(), InPlace, asks());
}

template <bool InPlace>
Maybe celu(const Tensor& x, const Scalar& alpha) {
  return fn::celu(x, alpha.toDouble(), InPlace, asks());
}

template <bool InPlace>
Maybe threshold(const Tensor& x, const Scalar& threshold, const Scalar& value) {
  return fn::threshold(x, threshold.toDouble(), value.toDouble(), InPlace, asks());
}

Maybe softplus(const Tensor& x, const Scalar& beta, const Scalar& threshold) {
  return fn::softplus(x, beta.toDouble(), threshold.toDouble(), asks());
}

template <auto Function, bool InPlace>
Maybe activation(const Tensor& x) {
  return Function(x, InPlace, asks());
}

Maybe batch_norm(const Tensor& x, Optional w, Optional b, Optional mean, Optional variance,
                 bool training, double momentum, double eps, bool /*cudnn*/) {
  return eps > 0 ? Maybe(fn::batch_norm(x, mean, variance, w, b, training, momentum, eps))
                 : Maybe();
}

Maybe layer_norm(const Tensor& x, Ints shape, Optional w, Optional b, double eps, bool /*cudnn*/) {
  const auto sizes = c10::asIntArrayRefSlowOpt(shape);
  return sizes ? Maybe(fn::layer_norm(x, *sizes, w, b, eps)) : Maybe();
}

Maybe rms_norm(const Tensor& x, Ints shape, Optional w, std::optional<double> eps) {
  const auto sizes = c10::asIntArrayRefSlowOpt(shape);
  return sizes ? Maybe(fn::rms_norm(x, *sizes, w, eps)) : Maybe();
}

Maybe cross_entropy(const Tensor& x, const Tensor& target, Optional w, std::int64_t reduction,
                    const c10::SymInt& ignore_index, double label_smoothing) {
  constexpr std::array kNames = {"none", "mean", "sum"};
  const auto ignored = ignore_index.maybe_as_int();
  if (!ignored || reduction < 0 || reduction > 2) {
    return {};
  }
  return fn::cross_entropy(x, target, w, *ignored, kNames[static_cast<std::size_t>(reduction)],
                           label_smoothing, false, asks());
}

Maybe attend(const Tensor& query, const Tensor& key, const Tensor& value, Optional mask,
             double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  return asks().is_always()
             ? attention_again(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)
             : Maybe();
}

// -- The table ------------------------------------------------------------------------------------

class Redirections {
 public:
  Redirections()
      : anything_(torch::Library::IMPL, "_", kRegionKey, __FILE__, __LINE__),
        torchs_(torch::Library::IMPL, "aten", kRegionKey, __FILE__, __LINE__) {
    anything_.fallback(torch::CppFunction::makeFallthrough());
    torch::Library& all = torchs_;
    redirect<ops::relu, activation<fn::relu, false>>(all);
    redirect<ops::relu_, activation<fn::relu, true>>(all);
    redirect<ops::hardsigmoid, activation<fn::hardsigmoid, false>>(all);
    redirect<ops::hardsigmoid_, activation<fn::hardsigmoid, true>>(all);
    redirect<ops::silu, activation<fn::silu, false>>(all);
    redirect<ops::silu_, activation<fn::silu, true>>(all);
    redirect<ops::hardswish, activation<fn::hardswish, false>>(all);
    redirect<ops::hardswish_, activation<fn::hardswish, true>>(all);
    redirect<ops::mish, activation<fn::mish, false>>(all);
    redirect<ops::mish_, activation<fn::mish, true>>(all);
    redirect<ops::hardtanh, hardtanh<false>>(all);
    redirect<ops::hardtanh_, hardtanh<true>>(all);
    redirect<ops::leaky_relu, leaky_relu<false>>(all);
    redirect<ops::leaky_relu_, leaky_relu<true>>(all);
    redirect<ops::elu, elu<false>>(all);
    redirect<ops::elu_, elu<true>>(all);
    redirect<ops::celu, celu<false>>(all);
    redirect<ops::celu_, celu<true>>(all);
    redirect<ops::selu, activation<fn::selu, false>>(all);
    redirect<ops::selu_, activation<fn::selu, true>>(all);
    redirect<ops::threshold, threshold<false>>(all);
    redirect<ops::threshold_, threshold<true>>(all);
    redirect<ops::softplus, softplus>(all);
    redirect<ops::log_sigmoid, [](const Tensor& x) { return Maybe(fn::logsigmoid(x, asks())); }>(
        all);
    redirect<ops::sigmoid, [](const Tensor& x) { return Maybe(fn::sigmoid(x, asks())); }>(all);
    redirect<ops::tanh, [](const Tensor& x) { return Maybe(fn::tanh(x, asks())); }>(all);
    redirect<ops::prelu, [](const Tensor& x, const Tensor& w) { return Maybe(fn::prelu(x, w)); }>(
        all);
    redirect<ops::gelu, [](const Tensor& x, c10::string_view approximate) {
      return Maybe(fn::gelu(x, approximate, asks()));
    }>(all);
    redirect<ops::dropout, dropout<false>>(all);
    redirect<ops::dropout_, dropout<true>>(all);
    redirect<ops::mul_Tensor, mul>(all);
    redirect<ops::add_Tensor, add<false>>(all);
    redirect<ops::add__Tensor, add<true>>(all);
    redirect<ops::linear, [](const Tensor& x, const Tensor& w, Optional b) {
      return Maybe(fn::linear(x, w, b, asks(), runs_again()));
    }>(all);
    redirect<ops::conv1d, conv<1>>(all);
    redirect<ops::conv2d, conv<2>>(all);
    redirect<ops::conv3d, conv<3>>(all);
    redirect<ops::conv1d_padding, conv_named<1>>(all);
    redirect<ops::conv2d_padding, conv_named<2>>(all);
    redirect<ops::conv3d_padding, conv_named<3>>(all);
    redirect<ops::pad, pad>(all);
    redirect<ops::_pad_enum, pad_enum>(all);  // of torch::nn
    redirect<ops::conv_transpose1d, conv_transpose<1>>(all);
    redirect<ops::conv_transpose2d_input, conv_transpose<2>>(all);
    redirect<ops::conv_transpose3d_input, conv_transpose<3>>(all);
    redirect<ops::batch_norm, batch_norm>(all);
    redirect<ops::layer_norm, layer_norm>(all);
    redirect<ops::group_norm,
             [](const Tensor& x, std::int64_t groups, Optional w, Optional b, double eps,
                bool /*cudnn*/) { return Maybe(fn::group_norm(x, groups, w, b, eps)); }>(all);
    redirect<ops::rms_norm, rms_norm>(all);
    redirect<ops::max_pool1d, max_pool<1>>(all);
    redirect<ops::max_pool2d, max_pool<2>>(all);
    redirect<ops::max_pool3d, max_pool<3>>(all);
    redirect<ops::max_pool1d_with_indices, max_pool_with_indices<1>>(all);
    redirect<ops::max_pool2d_with_indices, max_pool_with_indices<2>>(all);
    redirect<ops::max_pool3d_with_indices, max_pool_with_indices<3>>(all);
    redirect<ops::avg_pool1d, avg_pool1d>(all);
    redirect<ops::avg_pool2d, avg_pool<2>>(all);
    redirect<ops::avg_pool3d, avg_pool<3>>(all);
    redirect<ops::adaptive_avg_pool1d, adaptive_avg_pool1d>(all);
    redirect<ops::adaptive_avg_pool2d, adaptive_avg_pool<2>>(all);
    redirect<ops::adaptive_avg_pool3d, adaptive_avg_pool<3>>(all);
    redirect<ops::cross_entropy_loss, cross_entropy>(all);
    redirect<ops::scaled_dot_product_attention, attend>(all);
  }

 private:
  torch::Library anything_;
  torch::Library torchs_;
};

}  // namespace
}  // namespace redirections

void register_redirections() { static const redirections::Redirections all; }

}  // namespace brim::nn
