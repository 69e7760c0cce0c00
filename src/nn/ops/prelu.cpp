#include <ATen/ops/_prelu_kernel_backward.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/prelu.h>
#include <brim/nn/functional.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>

#include "nn/autograd/node.h"
#include "nn/autograd/operator.h"
#include "nn/ops/bits.h"

namespace brim::nn {
namespace {

/// With a frozen weight: keeps one bit per element, set where the input is above zero.
class PreluNode final : public Node {
 public:
  PreluNode(const at::Tensor& input, const at::Tensor& weight) : weight_(weight, false) {
    const BelowAutograd below;
    const at::Tensor source = dense(input);
    strides_ = c10::SymDimVector(source.sym_strides());
    input_strides_ = c10::SymDimVector(input.sym_strides());
    bits_ = SavedVariable(pack_bits(source.gt(0)), false);
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard lock(mutex_);
    const at::Tensor& grad = grads[0];
    if (!grad.defined()) {
      return {at::Tensor()};
    }
    // Of the input, torch's kernel reads only the signs for the input's gradient.
    const at::Tensor signs = apply_bits(at::ones_like(grad), bits_.unpack(), strides_, 1, -1);
    const at::Tensor result =
        std::get<0>(at::_prelu_kernel_backward(grad, signs, factors(grad.dim())));
    return {tied_to(next_edge(0), as_elementwise(result, input_strides_, grad.sym_strides()))};
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    bits_.reset_data();
    weight_.reset_data();
  }

  std::string name() const override { return "brim::prelu_backward"; }

 private:
  /// The weight in the shape that torch's operator gives it: one factor for all, or per channel.
  at::Tensor factors(std::int64_t dims) {
    at::Tensor weight = weight_.unpack();
    if (weight.dim() == dims) {
      return weight;
    }
    c10::SymDimVector shape(static_cast<std::size_t>(dims), 1);
    if (dims > 1) {
      shape[1] = weight.sym_numel();
    }
    return weight.reshape_symint(shape);
  }

  SavedVariable bits_;
  SavedVariable weight_;
  c10::SymDimVector strides_;        // of the tensor that the bits were made for
  c10::SymDimVector input_strides_;  // that torch's kernel would read
};

at::Tensor torch_prelu(const at::Tensor& input, const at::Tensor& weight) {
  return at::prelu(input, weight);
}

at::Tensor prelu_autograd(const at::Tensor& input, const at::Tensor& weight) {
  if (weight.requires_grad() || !needs_grad(input)) {  // the weight's gradient needs the input
    return at::prelu(input, weight);
  }
  const at::Tensor output = below_autograd([&] { return at::prelu(input, weight); });
  const auto node = make_node<PreluNode>(input, weight);
  node->set_next_edges(torch::autograd::collect_next_edges(input));
  torch::autograd::set_history(output, node);
  return output;
}

const LayerOperator<prelu_autograd, torch_prelu, CastTo::low> kPrelu(
    "prelu(Tensor input, Tensor weight) -> Tensor", {kInGraphs});

}  // namespace

namespace functional {

at::Tensor prelu(const at::Tensor& input, const at::Tensor& weight) {
  return kPrelu(input, weight);
}

}  // namespace functional

}  // namespace brim::nn
