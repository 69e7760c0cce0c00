#include "nn/ops/pad.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/pad.h>
#include <ATen/ops/reflection_pad1d_backward.h>
#include <ATen/ops/reflection_pad2d_backward.h>
#include <ATen/ops/reflection_pad3d_backward.h>
#include <ATen/ops/replication_pad1d_backward.h>
#include <ATen/ops/replication_pad2d_backward.h>
#include <ATen/ops/replication_pad3d_backward.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>

#include <array>

#include "nn/autograd/node.h"
#include "nn/autograd/operator.h"

namespace brim::nn {
namespace {

using Backward = at::Tensor (*)(const at::Tensor&, const at::Tensor&, at::IntArrayRef);

/// For one, two and three dimensions.
constexpr std::array<Backward, 3> kReflect = {
    at::reflection_pad1d_backward, at::reflection_pad2d_backward, at::reflection_pad3d_backward};
constexpr std::array<Backward, 3> kReplicate = {
    at::replication_pad1d_backward, at::replication_pad2d_backward, at::replication_pad3d_backward};

class PadNode final : public Node {
 public:
  PadNode(const at::Tensor& input, at::IntArrayRef padding, Backward backward)
      : sizes_(input.sizes().begin(), input.sizes().end()),
        padding_(padding.begin(), padding.end()),
        format_(input.suggest_memory_format()),
        type_(input.scalar_type()),
        backward_(backward) {}

  variable_list apply(variable_list&& grads) override {
    const at::Tensor& grad = grads[0];
    if (!grad.defined()) {
      return {at::Tensor()};
    }
    // torch's function asks for the input, and looks at its form only.
    const at::Tensor form = at::empty(sizes_, grad.options(), format_);
    return {tied_to(next_edge(0), backward_(grad, form, padding_).to(type_))};
  }

  std::string name() const override { return "brim::pad_backward"; }

 private:
  c10::DimVector sizes_;
  c10::DimVector padding_;
  at::MemoryFormat format_;
  at::ScalarType type_;  // autocast pads in float32
  Backward backward_;
};

at::Tensor torch_pad(const at::Tensor& input, at::IntArrayRef padding, std::string_view mode) {
  return at::pad(input, padding, mode);
}

at::Tensor pad_autograd(const at::Tensor& input, at::IntArrayRef padding, std::string_view mode) {
  const std::size_t dims = padding.size() / 2;
  // Of the others torch keeps nothing, or knows what is wrong with them.
  const bool keeps = (mode == "reflect" || mode == "replicate") && dims >= 1 && dims <= 3;
  if (!needs_grad(input) || !keeps || is_traced(input)) {
    return at::pad(input, padding, mode);
  }
  at::Tensor output = below_autograd([&] { return at::pad(input, padding, mode); });
  const auto node =
      make_node<PadNode>(input, padding, (mode == "reflect" ? kReflect : kReplicate)[dims - 1]);
  node->set_next_edges(torch::autograd::collect_next_edges(input));
  torch::autograd::set_history(output, node);
  return output;
}

const LayerOperator<pad_autograd, torch_pad> kPad(
    "pad(Tensor input, int[] pad, str mode) -> Tensor");

}  // namespace

at::Tensor pad(const at::Tensor& input, at::IntArrayRef padding, std::string_view mode) {
  return kPad(input, padding, mode);
}

}  // namespace brim::nn
