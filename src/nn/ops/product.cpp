#include <ATen/ops/mul.h>
#include <brim/nn/functional.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>

#include "nn/autograd/node.h"
#include "nn/autograd/operand.h"
#include "nn/autograd/operator.h"

namespace brim::nn {
namespace {

/// Each factor's gradient reads the other one. Autograd sums gradients to the shapes of the
/// factors, as it does for torch's product.
class ProductNode final : public SavingNode {
 public:
  ProductNode(const at::Tensor& first, const at::Tensor& second) : first_(first), second_(second) {}

  void keep(const at::Tensor& first, const at::Tensor& second, Again recompute) {
    if (second.requires_grad()) {
      first_.keep(first, recompute);
    }
    if (first.requires_grad()) {
      second_.keep(second, recompute);
    }
  }

  std::optional<int> layers_to_recompute() const override {
    const auto first = first_.layers();
    return first ? most_layers(first, second_.layers()) : std::nullopt;
  }

  bool prepare_to_recompute(bool copies) override {
    const std::lock_guard lock(mutex_);
    // The copies are no larger than what the next layer does not keep.
    const c10::SymInt most = elements() / 2;
    return first_.prepare(most, copies) && second_.prepare(most, copies);
  }

  at::Tensor recompute() override {
    const std::lock_guard lock(mutex_);
    return at::mul(first_.lend(), second_.lend());
  }

  std::string name() const override { return "brim::mul_backward"; }

 private:
  variable_list backward(const at::Tensor& grad) override {
    variable_list result(2);
    if (task_should_compute_output(0)) {
      result[0] = at::mul(grad, second_.take());
    }
    if (task_should_compute_output(1)) {
      result[1] = at::mul(grad, first_.take());
    }
    return result;
  }

  void forget() override {
    first_.forget();
    second_.forget();
  }

  void release() override {
    first_.release();
    second_.release();
  }

  Operand first_;
  Operand second_;
};

at::Tensor torch_mul(const at::Tensor& input, const at::Tensor& other, std::int64_t /*recompute*/) {
  return at::mul(input, other);
}

at::Tensor mul_autograd(const at::Tensor& input, const at::Tensor& other, std::int64_t recompute) {
  PtrTo<ProductNode> node;
  if (needs_grad(input, other)) {
    node = make_node<ProductNode>(input, other);
    node->set_next_edges(torch::autograd::collect_next_edges(input, other));
    node->keep(input, other, recompute);
  }
  at::Tensor output = below_autograd([&] { return at::mul(input, other); });
  add_to_graph<false>(output, node);
  return output;
}

const LayerOperator<mul_autograd, torch_mul> kMul(
    "mul(Tensor input, Tensor other, int recompute=0) -> Tensor");

}  // namespace

at::Tensor functional::mul(const at::Tensor& input, const at::Tensor& other, Again recompute) {
  return kMul(input, other, recompute);
}

}  // namespace brim::nn
