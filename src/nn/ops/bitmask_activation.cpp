#include "nn/ops/bitmask_activation.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/hardtanh.h>
#include <ATen/ops/hardtanh_backward.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/leaky_relu_backward.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/threshold_backward.h>
#include <brim/nn/functional.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>

#include "nn/autograd/node.h"
#include "nn/autograd/operator.h"
#include "nn/autograd/recompute.h"
#include "nn/autograd/saved_tensor.h"
#include "nn/cpu/bits.h"
#include "nn/cpu/number.h"
#include "nn/ops/bits.h"

namespace brim::nn {
namespace {

const char* name_of(Gate gate) {
  switch (gate) {
    case Gate::relu:
      return "relu";
    case Gate::hardtanh:
      return "hardtanh";
    case Gate::leaky_relu:
      return "leaky_relu";
  }
  return "gate";
}

at::Tensor value_of(const at::Tensor& input, std::int64_t gate, double a, double b) {
  switch (static_cast<Gate>(gate)) {
    case Gate::hardtanh:
      return at::hardtanh(input, a, b);
    case Gate::leaky_relu:
      return at::leaky_relu(input, a);
    default:
      return at::relu(input);
  }
}

at::Tensor& value_of_(at::Tensor& input, std::int64_t gate, double a, double b) {
  switch (static_cast<Gate>(gate)) {
    case Gate::hardtanh:
      return at::hardtanh_(input, a, b);
    case Gate::leaky_relu:
      return at::leaky_relu_(input, a);
    default:
      return at::relu_(input);
  }
}

/// Not zero where the gradient passes whole, with ATen operators.
at::Tensor passes(const at::Tensor& input, std::int64_t gate, double a, double b) {
  switch (static_cast<Gate>(gate)) {
    case Gate::hardtanh:
      // Not comparisons: they would round the bounds to the input's type first.
      return at::hardtanh_backward(at::ones_like(input), input, a, b);
    case Gate::leaky_relu:
      return input.gt(0);
    default:
      return input.le(0).logical_not_();  // NaN passes, as in torch
  }
}

// -- The kernels ------------------------------------------------------------------------------

at::Tensor empty_bits(const at::Tensor& of) {
  return at::empty({bit_bytes(of.numel())}, of.options().dtype(at::kByte));
}

std::tuple<at::Tensor, at::Tensor> pack_cpu(const at::Tensor& input, std::int64_t gate, double a,
                                            double b) {
  const at::Tensor source = dense(input);
  std::tuple<at::Tensor, at::Tensor> result{at::empty_like(source), empty_bits(source)};
  cpu::gate_pack(source, std::get<0>(result), std::get<1>(result), gate, a, b);
  return result;
}

at::Tensor pack_cpu_(at::Tensor& input, std::int64_t gate, double a, double b) {
  at::Tensor bits = empty_bits(input);
  cpu::gate_pack(input, input, bits, gate, a, b);
  return bits;
}

std::tuple<at::Tensor, at::Tensor> pack_anywhere(const at::Tensor& input, std::int64_t gate,
                                                 double a, double b) {
  const at::Tensor source = dense(input);
  return {value_of(source, gate, a, b), pack_bits(passes(source, gate, a, b))};
}

at::Tensor pack_anywhere_(at::Tensor& input, std::int64_t gate, double a, double b) {
  at::Tensor bits = pack_bits(passes(input, gate, a, b));
  value_of_(input, gate, a, b);
  return bits;
}

at::Tensor pack_meta_(at::Tensor& input, std::int64_t, double, double) {
  return at::empty_symint({bit_bytes(input.sym_numel())}, input.options().dtype(at::kByte));
}

std::tuple<at::Tensor, at::Tensor> pack_meta(const at::Tensor& input, std::int64_t gate, double a,
                                             double b) {
  at::Tensor output = at::empty_like(dense(input));
  return {output, pack_meta_(output, gate, a, b)};
}

// -- Autograd ---------------------------------------------------------------------------------

/// Whether a number of this type is the bound that the derivative is compared with.
bool holds(at::ScalarType type, double bound) {
  const auto wide = static_cast<float>(bound);
  return type == at::kHalf       ? static_cast<float>(to<at::Half>(bound)) == wide
         : type == at::kBFloat16 ? static_cast<float>(to<at::BFloat16>(bound)) == wide
                                 : true;
}

/// Keeps the bits; or the output, once a consumer keeps that anyway; or nothing, and asks the layer
/// before, if told to.
class GateNode final : public SavingNode {
 public:
  GateNode(const at::Tensor& input, Gate gate, double a, double b)
      : gate_(gate), a_(a), b_(b), before_(version_of(input)) {}

  void output_is_kept(const at::Tensor& output) override {
    const std::lock_guard lock(mutex_);
    if (is_released_ || keeps_ == Keeps::output || !output_tells(output.scalar_type())) {
      return;
    }
    output_ = Kept(without_history(output));
    keeps_ = Keeps::output;
    bits_ = Kept();
  }

  std::optional<int> layers_to_recompute() const override {
    return keeps_ == Keeps::output ? std::optional(0) : before_.with(next_edge(0).function.get());
  }

  bool prepare_to_recompute() override {
    const std::lock_guard lock(mutex_);
    return keeps_ == Keeps::output || prepare_before();
  }

  at::Tensor recompute() override {
    const std::lock_guard lock(mutex_);
    return keeps_ == Keeps::output ? lent_output() : again();
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard lock(mutex_);
    if (!grads[0].defined()) {
      again_.reset();
      return {at::Tensor()};
    }
    if (keeps_ == Keeps::bits) {
      again_.reset();
      return {tied_to(next_edge(0), from_bits(grads[0]))};
    }
    const bool is_kept = keeps_ == Keeps::output;
    const at::Tensor output = is_kept ? output_.take() : again();
    again_.reset();
    const at::Tensor result = from_output(grads[0], output);
    // A recomputed output is in the graph itself, and gets its zeros there.
    return {is_kept ? tied_to(next_edge(0), result) : result};
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    is_released_ = true;
    bits_.release();
    output_.release();
    again_.reset();
  }

  std::string name() const override { return std::string("brim::") + name_of(gate_) + "_backward"; }

  void keep(const at::Tensor& input, const at::Tensor& bits, const at::Tensor& output) {
    bits_ = Kept(bits);
    const auto strides = output.sym_strides();
    strides_ = c10::SymDimVector(strides.begin(), strides.end());
    const auto before = input.sym_strides();
    if (gate_ != Gate::relu && before != strides) {
      input_strides_ = c10::SymDimVector(before.begin(), before.end());
    }
  }

  /// Keeps nothing, if the layer before can give the input again. @returns whether it can.
  bool ask(at::ScalarType type) {
    if (!output_tells(type) || !are_few(layers_to_recompute()) || !prepare_before()) {
      return false;
    }
    keeps_ = Keeps::nothing;
    return true;
  }

 private:
  enum class Keeps { bits, output, nothing };

  /// Once: in a chain of residual blocks there are many ways to each layer.
  bool prepare_before() {
    is_prepared_ = is_prepared_ || nn::prepare_to_recompute(*next_edge(0).function);
    return is_prepared_;
  }

  at::Tensor from_bits(const at::Tensor& grad) {
    const at::Tensor result =
        apply_bits(grad, bits_.take(), strides_, 1.0, gate_ == Gate::leaky_relu ? a_ : 0.0);
    // torch's operators take the gradient and what they keep, its output or input, in this order.
    const c10::SymIntArrayRef kept = input_strides_.empty() ? strides_ : input_strides_;
    return gate_ == Gate::hardtanh ? as_elementwise(result, grad.sym_strides(), kept)
                                   : as_elementwise(result, kept, grad.sym_strides());
  }

  at::Tensor from_output(const at::Tensor& grad, const at::Tensor& output) const {
    switch (gate_) {
      case Gate::hardtanh:
        return at::hardtanh_backward(grad, output, a_, b_);
      case Gate::leaky_relu:
        return at::leaky_relu_backward(grad, output, a_, true);
      default:
        return at::threshold_backward(grad, output, 0);
    }
  }

  /// Whether the output says where the gradient passes. Below zero a slope under 0 turns the sign;
  /// and a bound that the type cannot hold is rounded in the output, maybe to the inner side.
  bool output_tells(at::ScalarType type) const {
    switch (gate_) {
      case Gate::hardtanh:
        return holds(type, a_) && holds(type, b_);
      case Gate::leaky_relu:
        return a_ >= 0;
      default:
        return true;
    }
  }

  at::Tensor lent_output() {
    at::Tensor output = output_.lend();
    if (at::GradMode::is_enabled()) {
      // Kept without its place in the graph, which would be a circle.
      output = without_history(output);
      torch::autograd::impl::set_gradient_edge(output, {compat::pointer_to(*this), 0});
    }
    return output;
  }

  at::Tensor again() {
    // In a chain of residual blocks each value is asked for by its own consumer and by the block
    // behind: it is worked out once, and held until this node runs.
    at::Tensor value = again_.get();
    if (!value.defined()) {
      Node& producer = *next_edge(0).function;
      value = gate_ == Gate::relu
                  ? nn::recompute_relu(producer)
                  : value_of(nn::recompute(producer), static_cast<std::int64_t>(gate_), a_, b_);
      again_.set(value);
    }
    return value;
  }

  Gate gate_;
  double a_;
  double b_;
  Keeps keeps_ = Keeps::bits;
  bool is_released_ = false;
  bool is_prepared_ = false;
  LayersBefore before_;
  Kept bits_;
  Kept output_;
  c10::SymDimVector strides_;        // of the output, for which the bits are
  c10::SymDimVector input_strides_;  // where the input's are others, and torch would keep that
  ForThisBackward again_;            // recomputed, between the first asking and apply
};

at::Tensor gate_autograd(const at::Tensor& input, std::int64_t gate, double a, double b,
                         bool recompute) {
  if (!needs_grad(input)) {
    const BelowAutograd below;
    return value_of(input, gate, a, b);
  }
  const auto node = make_node<GateNode>(input, static_cast<Gate>(gate), a, b);
  node->set_next_edges(torch::autograd::collect_next_edges(input));
  at::Tensor output;
  {
    const BelowAutograd below;
    if (recompute && node->ask(input.scalar_type())) {
      output = value_of(input, gate, a, b);
    } else {
      at::Tensor bits;
      std::tie(output, bits) = gate_pack(input, gate, a, b);
      node->keep(input, bits, output);
    }
  }
  torch::autograd::set_history(output, node);
  node->set_output(output);
  return output;
}

at::Tensor& gate_autograd_(at::Tensor& input, std::int64_t gate, double a, double b,
                           bool recompute) {
  const bool needed = needs_grad(input);
  torch::autograd::check_inplace(input, needed);
  if (!needed) {
    const BelowAutograd below;
    value_of_(input, gate, a, b);
    torch::autograd::increment_version(input);
    return input;
  }
  const auto node = make_node<GateNode>(input, static_cast<Gate>(gate), a, b);
  node->set_next_edges(torch::autograd::collect_next_edges(input));
  {
    const BelowAutograd below;
    if (recompute && node->ask(input.scalar_type())) {
      value_of_(input, gate, a, b);
    } else if (input.is_non_overlapping_and_dense()) {
      node->keep(input, gate_pack_(input, gate, a, b), input);
    } else {
      const auto [output, bits] = gate_pack(input, gate, a, b);
      input.copy_(output);
      node->keep(input, bits, output);
    }
  }
  torch::autograd::increment_version(input);
  torch::autograd::rebase_history(input, node);
  node->set_output(input);
  return input;
}

at::Tensor torch_gate(const at::Tensor& input, std::int64_t gate, double a, double b,
                      bool /*recompute*/) {
  return value_of(input, gate, a, b);
}

at::Tensor& torch_gate_(at::Tensor& input, std::int64_t gate, double a, double b,
                        bool /*recompute*/) {
  return value_of_(input, gate, a, b);
}

const Operator<pack_anywhere> kPack(
    "gate_pack(Tensor input, int gate, float a, float b) -> (Tensor, Tensor)",
    {.cpu = pack_cpu, .meta = pack_meta}, {at::Tag::needs_fixed_stride_order});
const Operator<pack_anywhere_> kPackInPlace(
    "gate_pack_(Tensor(a!) input, int gate, float a, float b) -> Tensor",
    {.cpu = pack_cpu_, .meta = pack_meta_}, {at::Tag::needs_fixed_stride_order});
const LayerOperator<gate_autograd, torch_gate> kGate(
    "gate(Tensor input, int gate, float a, float b, bool recompute=False) -> Tensor");
const LayerOperator<gate_autograd_, torch_gate_> kGateInPlace(
    "gate_(Tensor(a!) input, int gate, float a, float b, bool recompute=False) -> Tensor(a!)");

at::Tensor run(const at::Tensor& input, Gate gate, double a, double b, bool inplace,
               bool recompute) {
  if (inplace) {
    at::Tensor target = input;
    return kGateInPlace(target, static_cast<std::int64_t>(gate), a, b, recompute);
  }
  return kGate(input, static_cast<std::int64_t>(gate), a, b, recompute);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> gate_pack(const at::Tensor& input, std::int64_t gate, double a,
                                             double b) {
  return kPack(input, gate, a, b);
}

at::Tensor gate_pack_(at::Tensor& input, std::int64_t gate, double a, double b) {
  return kPackInPlace(input, gate, a, b);
}

namespace functional {

at::Tensor relu(const at::Tensor& input, bool inplace, bool recompute) {
  return run(input, Gate::relu, 0, 0, inplace, recompute);
}

at::Tensor relu6(const at::Tensor& input, bool inplace, bool recompute) {
  return run(input, Gate::hardtanh, 0, 6, inplace, recompute);
}

at::Tensor hardtanh(const at::Tensor& input, double min_val, double max_val, bool inplace,
                    bool recompute) {
  TORCH_CHECK_VALUE(min_val < max_val, "min_val must be below max_val, got ", min_val, " and ",
                    max_val);
  return run(input, Gate::hardtanh, min_val, max_val, inplace, recompute);
}

at::Tensor leaky_relu(const at::Tensor& input, double negative_slope, bool inplace,
                      bool recompute) {
  return run(input, Gate::leaky_relu, negative_slope, 0, inplace, recompute);
}

}  // namespace functional

}  // namespace brim::nn
