#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <brim/nn/functional.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>

#include "nn/autograd/node.h"
#include "nn/autograd/operator.h"
#include "nn/autograd/saved_tensor.h"

// Activations whose derivative needs the input itself.

namespace brim::nn {
namespace {

enum class Smooth { gelu, gelu_tanh, silu };

const char* name_of(Smooth kind) { return kind == Smooth::silu ? "silu" : "gelu"; }

const char* approximate_of(Smooth kind) { return kind == Smooth::gelu_tanh ? "tanh" : "none"; }

at::Tensor value_of(Smooth kind, const at::Tensor& input) {
  return kind == Smooth::silu ? at::silu(input) : at::gelu(input, approximate_of(kind));
}

at::Tensor silu_grad(const at::Tensor& grad, const at::Tensor& input) {
  if (!at::GradMode::is_enabled()) {
    return at::silu_backward(grad, input);
  }
  const at::Tensor gate = input.sigmoid();  // torch's kernel has no derivative
  return grad.mul(gate).mul(gate.neg().add(1).mul(input).add(1));
}

class SmoothNode final : public SavingNode {
 public:
  explicit SmoothNode(Smooth kind) : kind_(kind) {}

  void keep(const at::Tensor& input) { input_ = Kept(input); }

  std::optional<int> layers_to_recompute() const override { return 1; }

  at::Tensor recompute() override {
    const std::lock_guard lock(mutex_);
    return value_of(kind_, input_.lend());
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard lock(mutex_);
    if (!grads[0].defined()) {
      return {at::Tensor()};
    }
    const at::Tensor input = input_.take();
    return {kind_ == Smooth::silu ? silu_grad(grads[0], input)
                                  : at::gelu_backward(grads[0], input, approximate_of(kind_))};
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    input_.release();
  }

  std::string name() const override { return std::string("brim::") + name_of(kind_) + "_backward"; }

 private:
  Smooth kind_;
  Kept input_;
};

at::Tensor smooth(Smooth kind, const at::Tensor& input) {
  PtrTo<SmoothNode> node;
  if (needs_grad(input)) {
    node = make_node<SmoothNode>(kind);
    node->set_next_edges(torch::autograd::collect_next_edges(input));
    tell_producer_kept(input);
    node->keep(input);
  }
  at::Tensor output = [&] {
    const BelowAutograd below;
    return value_of(kind, input);
  }();
  if (node) {
    torch::autograd::set_history(output, node);
    node->set_output(output);
  }
  return output;
}

Smooth gelu_kind(std::string_view approximate) {
  TORCH_CHECK(approximate == "none" || approximate == "tanh",
              "approximate must be none or tanh, got ", approximate);
  return approximate == "tanh" ? Smooth::gelu_tanh : Smooth::gelu;
}

at::Tensor torch_gelu(const at::Tensor& input, std::string_view approximate) {
  return value_of(gelu_kind(approximate), input);
}

at::Tensor gelu_autograd(const at::Tensor& input, std::string_view approximate) {
  return smooth(gelu_kind(approximate), input);
}

at::Tensor torch_silu(const at::Tensor& input) { return at::silu(input); }

at::Tensor silu_autograd(const at::Tensor& input) { return smooth(Smooth::silu, input); }

at::Tensor& torch_silu_(at::Tensor& input) { return at::silu_(input); }

at::Tensor& silu_autograd_(at::Tensor& input) {
  PtrTo<SmoothNode> node;
  const bool needed = needs_grad(input);
  torch::autograd::check_inplace(input, needed);
  if (needed) {
    node = make_node<SmoothNode>(Smooth::silu);
    node->set_next_edges(torch::autograd::collect_next_edges(input));
    // Above autograd, so that a second derivative reaches the input. As torch does: the value that
    // is overwritten is needed.
    node->keep(input.clone());
  }
  {
    const BelowAutograd below;
    at::silu_(input);
  }
  torch::autograd::increment_version(input);
  if (node) {
    torch::autograd::rebase_history(input, node);
    node->set_output(input);
  }
  return input;
}

const LayerOperator<gelu_autograd, torch_gelu> kGelu(
    "gelu(Tensor input, str approximate) -> Tensor");
const LayerOperator<silu_autograd, torch_silu> kSilu("silu(Tensor input) -> Tensor");
const LayerOperator<silu_autograd_, torch_silu_> kSiluInPlace(
    "silu_(Tensor(a!) input) -> Tensor(a!)");

}  // namespace

namespace functional {

at::Tensor gelu(const at::Tensor& input, std::string_view approximate) {
  return kGelu(input, approximate);
}

at::Tensor silu(const at::Tensor& input, bool inplace) {
  if (inplace) {
    at::Tensor target = input;
    return kSiluInPlace(target);
  }
  return kSilu(input);
}

}  // namespace functional
}  // namespace brim::nn
