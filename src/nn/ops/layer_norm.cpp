#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <brim/nn/functional.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include <array>

#include "nn/autograd/float_autocast.h"
#include "nn/autograd/known.h"
#include "nn/autograd/node.h"
#include "nn/autograd/optional_tensor.h"
#include "nn/ops/channels.h"

namespace brim::nn {
namespace {

class LayerNormNode final : public SavingNode {
 public:
  LayerNormNode(at::IntArrayRef shape, double eps)
      : shape_(shape.begin(), shape.end()), eps_(eps) {}

  void keep(const at::Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias,
            const at::Tensor& mean, const at::Tensor& rstd) {
    tell_producer_kept(input);
    keeps_input_ = true;
    input_ = Kept(input);
    weight_ = kept(weight);
    bias_ = kept(bias);
    mean_ = Kept(mean);
    rstd_ = Kept(rstd);
  }

  void keep_type(at::ScalarType bias_type) { bias_type_ = bias_type; }

  std::optional<int> layers_to_recompute() const override {
    return keeps_input_ ? std::optional(1) : std::nullopt;
  }

  bool prepare_to_recompute() override {
    const std::lock_guard lock(mutex_);
    // The copies are no larger than what the layer behind does not keep.
    const c10::SymInt most = elements() / 2;
    return weight_.freeze(most) && bias_.freeze(most);
  }

  at::Tensor recompute() override {
    const std::lock_guard lock(mutex_);
    return std::get<0>(at::native_layer_norm(input_.lend(), shape_, maybe(weight_.lend()),
                                             maybe(bias_.lend()), eps_));
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard lock(mutex_);
    variable_list result(3);
    const at::Tensor& grad = grads[0];
    if (!grad.defined()) {
      return result;
    }
    if (!keeps_input_) {
      result[2] = bias_grad(grad);
      return result;
    }
    const std::array<bool, 3> mask{task_should_compute_output(0), task_should_compute_output(1),
                                   task_should_compute_output(2)};
    std::tie(result[0], result[1], result[2]) =
        at::native_layer_norm_backward(grad, input_.take(), shape_, mean_.take(), rstd_.take(),
                                       maybe(weight_.take()), maybe(bias_.take()), mask);
    return result;
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    for (Kept* const each : {&input_, &weight_, &bias_, &mean_, &rstd_}) {
      each->release();
    }
  }

  std::string name() const override { return "brim::layer_norm_backward"; }

 private:
  at::Tensor bias_grad(const at::Tensor& grad) const {
    const std::int64_t rows = grad.dim() - static_cast<std::int64_t>(shape_.size());
    if (rows == 0) {  // summing over no dimension means all of them
      return grad.to(bias_type_);
    }
    c10::DimVector dims;
    for (std::int64_t i = 0; i < rows; ++i) {
      dims.push_back(i);
    }
    return sum_in_parts(grad, dims, bias_type_);
  }

  c10::DimVector shape_;
  bool keeps_input_ = false;
  at::ScalarType bias_type_ = at::kFloat;
  double eps_;
  Kept input_;
  Kept weight_;
  Kept bias_;
  Kept mean_;
  Kept rstd_;
};

at::Tensor layer_norm_anywhere(const at::Tensor& input, at::IntArrayRef shape,
                               const MaybeTensor& weight, const MaybeTensor& bias, double eps) {
  return at::layer_norm(input, shape, weight, bias, eps);
}

at::Tensor layer_norm_autograd(const at::Tensor& input, at::IntArrayRef shape,
                               const MaybeTensor& weight, const MaybeTensor& bias, double eps) {
  PtrTo<LayerNormNode> node;
  if (needs_grad(input, weight, bias)) {
    node = make_node<LayerNormNode>(shape, eps);
    node->set_next_edges(torch::autograd::collect_next_edges(input, weight, bias));
  }
  auto [output, mean, rstd] = [&] {
    const BelowAutograd below;
    return at::native_layer_norm(input, shape, weight, bias, eps);
  }();
  if (!node) {
    return std::move(output);
  }
  if (input.requires_grad() || trains(weight)) {
    node->keep(input, weight, bias, mean, rstd);
  } else {
    node->keep_type(bias->scalar_type());
  }
  torch::autograd::set_history(output, node);
  node->set_output(output);
  return std::move(output);
}

using LayerNormOp = at::Tensor(const at::Tensor&, at::IntArrayRef, const MaybeTensor&,
                               const MaybeTensor&, double);

at::Tensor call(const at::Tensor& input, at::IntArrayRef shape, const MaybeTensor& weight,
                const MaybeTensor& bias, double eps) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("brim::layer_norm", "").typed<LayerNormOp>();
  return op.call(input, shape, weight, bias, eps);
}

template <c10::DeviceType Backend>
at::Tensor layer_norm_autocast(const at::Tensor& input, at::IntArrayRef shape,
                               const MaybeTensor& weight, const MaybeTensor& bias, double eps) {
  const Autocast autocast(Backend);
  return call(autocast.cast(at::kFloat, input), shape, autocast.cast(at::kFloat, weight),
              autocast.cast(at::kFloat, bias), eps);
}

}  // namespace

namespace functional {

at::Tensor layer_norm(const at::Tensor& input, at::IntArrayRef normalized_shape,
                      const MaybeTensor& weight, const MaybeTensor& bias, double eps) {
  return call(input, normalized_shape, weight, bias, eps);
}

}  // namespace functional

TORCH_LIBRARY_FRAGMENT(brim, m) {
  m.def(
      "layer_norm(Tensor input, int[] normalized_shape, Tensor? weight, Tensor? bias, float eps) "
      "-> Tensor");
}

TORCH_LIBRARY_IMPL(brim, CompositeExplicitAutograd, m) {
  m.impl("layer_norm", layer_norm_anywhere);
}

// Under vmap as torch does it: torch knows how to batch its own operators.
TORCH_LIBRARY_IMPL(brim, FuncTorchBatched, m) { m.impl("layer_norm", layer_norm_anywhere); }

TORCH_LIBRARY_IMPL(brim, Autograd, m) {
  m.impl("layer_norm", kOrTorchs<layer_norm_autograd, layer_norm_anywhere>);
}

BRIM_AUTOCAST_AS_TORCH(layer_norm)

}  // namespace brim::nn
