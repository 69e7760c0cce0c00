#include <ATen/Dispatch.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_dropout.h>
#include <ATen/ops/zeros_like.h>
#include <brim/nn/functional.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>

#include <optional>

#include "nn/autograd/node.h"
#include "nn/autograd/operator.h"
#include "nn/autograd/recompute.h"
#include "nn/autograd/saved_tensor.h"
#include "nn/cpu/number.h"
#include "nn/ops/bits.h"

// Dropout draws its random numbers with the operators that torch's own dropout calls, so that the
// same seed gives the same elements. What torch keeps of them as numbers or bytes is kept as bits.

namespace brim::nn {
namespace {

/// Where torch does nothing, and draws nothing.
bool does_nothing(const at::Tensor& input, double p) { return p == 0.0 || input.sym_numel() == 0; }

/// What the operators multiply with that are not fused: 1 / (1 - p), worked out and rounded in the
/// input's type.
double rounded_scale(const at::Tensor& input, double p) {
  return AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, input.scalar_type(), "brim::dropout", [&] {
        const auto kept = static_cast<Wide<scalar_t>>(1.0 - p);
        return static_cast<double>(static_cast<Wide<scalar_t>>(to<scalar_t>(1 / kept)));
      });
}

/// Keeps the bits of the elements that stay; nothing where p is 1.
class DropoutNode final : public SavingNode {
 public:
  explicit DropoutNode(const at::Tensor& input) : before_(version_of(input)) {}

  std::optional<int> layers_to_recompute() const override {
    return scale_ != 0.0 ? before_.with(next_edge(0)) : std::nullopt;
  }

  bool prepare_to_recompute(bool copies) override {
    return nn::prepare_to_recompute(*next_edge(0).function, copies);
  }

  at::Tensor recompute() override {
    const std::lock_guard lock(mutex_);
    // Worked out once for all that ask, and held until this node runs.
    at::Tensor value = again_.get();
    if (!value.defined()) {
      value = apply_bits(nn::recompute(next_edge(0)), bits_.lend(), strides_, scale_, 0.0);
      again_.set(value);
    }
    return value;
  }

  std::string name() const override { return "brim::dropout_backward"; }

  void keep(const at::Tensor& bits, c10::SymIntArrayRef strides, double scale) {
    bits_ = Kept(bits);
    strides_ = c10::SymDimVector(strides);
    scale_ = scale;
  }

 private:
  variable_list backward(const at::Tensor& grad) override {
    again_.reset();
    if (scale_ == 0.0) {
      return {at::zeros_like(grad)};
    }
    return {as_elementwise(apply_bits(grad, bits_.take(), strides_, scale_, 0.0),
                           grad.sym_strides(), strides_)};
  }

  void forget() override { again_.reset(); }

  void release() override {
    bits_.release();
    again_.reset();
  }

  double scale_ = 0;  // 0: all elements are dropped
  LayersBefore before_;
  Kept bits_;
  c10::SymDimVector strides_;
  ForThisBackward again_;  // recomputed, between the first asking and apply
};

/// Below autograd. @param fused as the operator out of place does where torch has it
at::Tensor run_and_keep(const at::Tensor& input, double p, bool fused, DropoutNode& node) {
  if (p == 1.0) {
    return at::zeros_like(input);
  }
  if (fused) {
    auto [output, drawn] = at::native_dropout(input, p, true);
    node.keep(pack_bits(drawn), drawn.sym_strides(), 1.0 / (1.0 - p));
    return output;
  }
  at::Tensor drawn = at::empty_like(input).bernoulli_(1.0 - p);
  const at::Tensor bits = pack_bits(drawn);
  const c10::SymDimVector strides(drawn.sym_strides());
  drawn.reset();  // before the output is made: as much memory as torch takes
  const double scale = rounded_scale(input, p);
  node.keep(bits, strides, scale);
  return as_elementwise(apply_bits(input, bits, strides, scale, 0.0), input.sym_strides(), strides);
}

at::Tensor torch_dropout(const at::Tensor& input, double p) { return at::dropout(input, p, true); }

at::Tensor& torch_dropout_(at::Tensor& input, double p) { return at::dropout_(input, p, true); }

template <bool InPlace>
at::Tensor run(at::Tensor input, double p) {
  if (does_nothing(input, p)) {
    return input;
  }
  const bool needed = needs_grad(input);
  if (InPlace) {
    will_overwrite(input, needed);
  }
  PtrTo<DropoutNode> node;
  at::Tensor output;
  if (needed) {
    node = make_node<DropoutNode>(input);
    node->set_next_edges(torch::autograd::collect_next_edges(input));
    const BelowAutograd below;
    // On CUDA torch's dropout is one fused operator, with random numbers of its own.
    output = run_and_keep(input, p, !InPlace && input.is_cuda(), *node);
    if (InPlace) {
      output = input.copy_(output);
    }
  } else {
    const BelowAutograd below;
    output = InPlace ? torch_dropout_(input, p) : torch_dropout(input, p);
  }
  add_to_graph<InPlace>(output, node);
  return output;
}

at::Tensor dropout_autograd(const at::Tensor& input, double p) { return run<false>(input, p); }

at::Tensor& dropout_autograd_(at::Tensor& input, double p) {
  run<true>(input, p);
  return input;
}

constexpr at::Tag kRandom = at::Tag::nondeterministic_seeded;
const LayerOperator<dropout_autograd, torch_dropout> kDropout(
    "dropout(Tensor input, float p) -> Tensor", {kRandom, kInGraphs});
const LayerOperator<dropout_autograd_, torch_dropout_> kDropoutInPlace(
    "dropout_(Tensor(a!) input, float p) -> Tensor(a!)", {kRandom});

}  // namespace

at::Tensor functional::dropout(const at::Tensor& input, double p, bool training, bool inplace) {
  TORCH_CHECK_VALUE(p >= 0.0 && p <= 1.0, "p must be from 0 to 1, got ", p);
  if (!training) {
    return input;
  }
  if (inplace) {
    at::Tensor target = input;
    return kDropoutInPlace(target, p);
  }
  return kDropout(input, p);
}

}  // namespace brim::nn
