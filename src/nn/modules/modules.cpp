#include <brim/nn/functional.h>
#include <brim/nn/norm.h>
#include <torch/nn/init.h>

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

detail::LayerRegion::LayerRegion(Recompute recompute) : before_(Saving::state()) {
  Saving::set_state(Saving::within(recompute, /*of_module=*/true));
}

detail::LayerRegion::~LayerRegion() { Saving::set_state(before_); }

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

}  // namespace brim::nn
