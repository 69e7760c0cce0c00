#include "nn/node.h"

namespace brim::nn {

at::Tensor SavingNode::recompute() {
  TORCH_INTERNAL_ASSERT(false, name(), " cannot give its output again");
}

void tell_producer_kept(const at::Tensor& input) {
  if (auto* const node = dynamic_cast<SavingNode*>(input.grad_fn().get())) {
    node->output_is_kept(input);
  }
}

void refuse_forward_ad(const char* layer, const at::Tensor& input) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !torch::autograd::isFwGradDefined(input), "brim's ", layer,
      " has no forward-mode derivative (torch.func.jvp): use torch.nn's layer there, "
      "brim.restore(model) puts it back");
}

void refuse_forward_ad(const char* layer, const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias) {
  refuse_forward_ad(layer, input);
  if (weight.defined()) {
    refuse_forward_ad(layer, weight);
  }
  if (bias && bias->defined()) {
    refuse_forward_ad(layer, *bias);
  }
}

void check_floating(const char* layer, const at::Tensor& input) {
  TORCH_CHECK_TYPE(input.is_floating_point(), "brim's ", layer,
                   " takes float32, float64, bfloat16 or float16, got input of type ",
                   input.scalar_type());
}

}  // namespace brim::nn
