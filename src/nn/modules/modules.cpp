#include <brim/nn/activation.h>
#include <brim/nn/dropout.h>
#include <brim/nn/functional.h>
#include <brim/nn/norm.h>
#include <brim/nn/pooling.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/utils.h>

#include <cstddef>
#include <string_view>

#include "nn/autograd/optional_tensor.h"

namespace brim::nn {

void detail::print_as_ours(std::ostream& stream, const std::string& text) {
  constexpr std::string_view kTheirs = "torch::";
  const std::string_view all = text;
  if (all.starts_with(kTheirs)) {
    stream << "brim::" << all.substr(kTheirs.size());
  } else {
    stream << all;
  }
}

// -- Dropout ------------------------------------------------------------------------------------

// By value, as torch::nn declares it: the signature decides what an AnyModule accepts.
// NOLINTNEXTLINE(performance-unnecessary-value-param)
at::Tensor DropoutImpl::forward(at::Tensor input) {
  return functional::dropout(input, options.p(), is_training(), options.inplace());
}

// -- Normalisation ------------------------------------------------------------------------------

namespace {

template <class Impl>
at::Tensor batch_norm(Impl& self, const at::Tensor& input) {
  const bool tracks = self.options.track_running_stats();
  double momentum = self.options.momentum().value_or(0.0);
  if (self.is_training() && tracks && self.num_batches_tracked.defined()) {
    self.num_batches_tracked += 1;
    if (!self.options.momentum().has_value()) {  // the mean over all batches so far
      momentum = 1.0 / self.num_batches_tracked.template item<double>();
    }
  }
  return functional::batch_norm(input, maybe(self.running_mean), maybe(self.running_var),
                                maybe(self.weight), maybe(self.bias), self.is_training() || !tracks,
                                momentum, self.options.eps());
}

}  // namespace

at::Tensor BatchNorm1dImpl::forward(const at::Tensor& input) {
  _check_input_dim(input);
  return batch_norm(*this, input);
}

at::Tensor BatchNorm2dImpl::forward(const at::Tensor& input) {
  _check_input_dim(input);
  return batch_norm(*this, input);
}

at::Tensor BatchNorm3dImpl::forward(const at::Tensor& input) {
  _check_input_dim(input);
  return batch_norm(*this, input);
}

at::Tensor LayerNormImpl::forward(const at::Tensor& input) {
  return functional::layer_norm(input, options.normalized_shape(), maybe(weight), maybe(bias),
                                options.eps());
}

at::Tensor GroupNormImpl::forward(const at::Tensor& input) {
  return functional::group_norm(input, options.num_groups(), maybe(weight), maybe(bias),
                                options.eps());
}

RMSNormImpl::RMSNormImpl(RMSNormOptions given) : options(std::move(given)) {
  TORCH_CHECK_VALUE(!options.normalized_shape().empty(),
                    "normalized_shape must have at least one size, got none");
  for (const std::int64_t size : options.normalized_shape()) {
    TORCH_CHECK_VALUE(size > 0, "normalized_shape must hold sizes above 0, got ",
                      options.normalized_shape());
  }
  RMSNormImpl::reset();
}

void RMSNormImpl::reset() {
  if (options.elementwise_affine()) {
    weight = register_parameter("weight", torch::empty(options.normalized_shape()));
  } else {
    weight = register_parameter("weight", at::Tensor(), /*requires_grad=*/false);
  }
  reset_parameters();
}

void RMSNormImpl::reset_parameters() {
  if (weight.defined()) {
    torch::nn::init::ones_(weight);
  }
}

void RMSNormImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "brim::nn::RMSNorm(" << at::IntArrayRef(options.normalized_shape())
         << ", eps=";
  if (options.eps().has_value()) {
    stream << *options.eps();
  } else {
    stream << "None";
  }
  stream << ", elementwise_affine=" << options.elementwise_affine() << ')';
}

at::Tensor RMSNormImpl::forward(const at::Tensor& input) {
  return functional::rms_norm(input, options.normalized_shape(), maybe(weight), options.eps());
}

// -- Pooling ------------------------------------------------------------------------------------

namespace {

template <std::size_t D>
at::Tensor max_pool(const torch::nn::MaxPoolOptions<D>& options, const at::Tensor& input) {
  return functional::max_pool(input, *options.kernel_size(), *options.stride(), *options.padding(),
                              *options.dilation(), options.ceil_mode());
}

template <std::size_t D>
std::tuple<at::Tensor, at::Tensor> max_pool_with_indices(
    const torch::nn::MaxPoolOptions<D>& options, const at::Tensor& input) {
  return functional::max_pool_with_indices(input, *options.kernel_size(), *options.stride(),
                                           *options.padding(), *options.dilation(),
                                           options.ceil_mode());
}

template <std::size_t D>
at::Tensor avg_pool(const torch::nn::AvgPoolOptions<D>& options, const at::Tensor& input) {
  // torch has no divisor for one dimension, and leaves the option aside.
  return functional::avg_pool(input, *options.kernel_size(), *options.stride(), *options.padding(),
                              options.ceil_mode(), options.count_include_pad(),
                              D == 1 ? std::nullopt : options.divisor_override());
}

template <class Size>
at::Tensor adaptive_avg_pool(const torch::nn::AdaptiveAvgPoolOptions<Size>& options,
                             const at::Tensor& input) {
  return functional::adaptive_avg_pool(
      input, torch::nn::modules::utils::_list_with_default(options.output_size(), input.sizes()));
}

}  // namespace

at::Tensor MaxPool1dImpl::forward(const at::Tensor& input) { return max_pool(options, input); }
at::Tensor MaxPool2dImpl::forward(const at::Tensor& input) { return max_pool(options, input); }
at::Tensor MaxPool3dImpl::forward(const at::Tensor& input) { return max_pool(options, input); }

std::tuple<at::Tensor, at::Tensor> MaxPool1dImpl::forward_with_indices(const at::Tensor& input) {
  return max_pool_with_indices(options, input);
}

std::tuple<at::Tensor, at::Tensor> MaxPool2dImpl::forward_with_indices(const at::Tensor& input) {
  return max_pool_with_indices(options, input);
}

std::tuple<at::Tensor, at::Tensor> MaxPool3dImpl::forward_with_indices(const at::Tensor& input) {
  return max_pool_with_indices(options, input);
}

at::Tensor AvgPool1dImpl::forward(const at::Tensor& input) { return avg_pool(options, input); }
at::Tensor AvgPool2dImpl::forward(const at::Tensor& input) { return avg_pool(options, input); }
at::Tensor AvgPool3dImpl::forward(const at::Tensor& input) { return avg_pool(options, input); }

at::Tensor AdaptiveAvgPool1dImpl::forward(const at::Tensor& input) {
  return functional::adaptive_avg_pool(input, *options.output_size());
}

at::Tensor AdaptiveAvgPool2dImpl::forward(const at::Tensor& input) {
  return adaptive_avg_pool(options, input);
}

at::Tensor AdaptiveAvgPool3dImpl::forward(const at::Tensor& input) {
  return adaptive_avg_pool(options, input);
}

}  // namespace brim::nn
