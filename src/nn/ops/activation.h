#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "nn/autograd/kept_while_room.h"
#include "nn/autograd/node.h"
#include "nn/autograd/operator.h"
#include "nn/autograd/recompute.h"
#include "nn/autograd/saved_tensor.h"
#include "nn/ops/bits.h"

// What activations have in common. Each one is a struct with its options as members:
//
//     struct Hardswish {
//       static constexpr const char* kName = "hardswish";  // as in torch.nn.functional
//       static constexpr Reads kReads = Reads::input;      // what torch's derivative reads
//       at::Tensor value(const at::Tensor& x) const;       // by torch's operators, as all of these
//       at::Tensor& value_(at::Tensor& x) const;           // in place, where torch has that
//       at::Tensor grad(const at::Tensor& grad, const at::Tensor& read) const;
//     };
//
// If torch's autocast runs it in float32, the struct also has
//
//       static constexpr CastTo kCast = CastTo::float32;
//
// If its derivative has two values, one bit per element is enough. Such a struct also has
//
//       BitRule bits() const;
//       at::Tensor passes(const at::Tensor& x) const;      // not zero where a bit is set
//       static constexpr bool kGradFirst;                  // order of torch's operands: strides
//
// If moreover the output can take the place of the bits, `grad` reads that, and there is
//
//       bool output_tells(at::ScalarType type) const;      // whether it can in this type

namespace brim::nn {

enum class Reads { input, output };

/// What the kernels that make and apply bits are told.
struct BitRule {
  double a = 0;  // options of the activation, see bitmask_functions.h
  double b = 0;
  double on = 1;  // the derivative where the bit is set, and elsewhere
  double off = 0;
};

template <class A>
concept HasBits = requires(const A& activation) { activation.bits(); };

template <class A>
concept OutputTells = requires(const A& activation) { activation.output_tells(at::kFloat); };

/// The value of the activation of this name, and its bits in the order of the value's memory.
std::tuple<at::Tensor, at::Tensor> bitmask_pack(const at::Tensor& input, std::string_view name,
                                                double a, double b);

/// The same in place; returns the bits. `input` is dense and does not overlap itself.
at::Tensor bitmask_pack_(at::Tensor& input, std::string_view name, double a, double b);

/// Keeps what the derivative reads, or bits in its place; or the output, once a consumer keeps that
/// anyway; or nothing, and asks the layer before, if told to.
template <class A>
class ActivationNode final : public SavingNode {
 public:
  ActivationNode(const at::Tensor& input, const A& activation)
      : activation_(activation), before_(version_of(input)) {}

  /// The input, or the output where the derivative reads that.
  void keep(const at::Tensor& read, bool is_inplace_on_view = false) {
    saved_ = A::kReads == Reads::input ? Kept(read) : Kept::output(read, is_inplace_on_view);
    keeps_ = Keeps::read;
  }

  /// At forward, below autograd. @returns the output
  template <bool InPlace>
  at::Tensor run_and_keep_bits(at::Tensor& input) {
    const BitRule rule = activation_.bits();
    at::Tensor output = input;
    at::Tensor bits;
    if (InPlace && input.is_non_overlapping_and_dense()) {
      bits = bitmask_pack_(input, A::kName, rule.a, rule.b);
    } else {
      std::tie(output, bits) = bitmask_pack(input, A::kName, rule.a, rule.b);
    }
    saved_ = Kept(bits);
    keeps_ = Keeps::bits;
    strides_ = c10::SymDimVector(output.sym_strides());
    if (!InPlace) {
      output = as_elementwise(output, input.sym_strides(), input.sym_strides());
    } else if (!output.is_same(input)) {
      output = input.copy_(output);
    }
    const auto read = (A::kReads == Reads::input ? input : output).sym_strides();
    if (read != c10::SymIntArrayRef(strides_)) {
      read_strides_ = c10::SymDimVector(read);
    }
    return output;
  }

  /// Keeps nothing, if the layer before can recompute the input. @returns whether it can
  [[nodiscard]] bool ask(const at::Tensor& input, bool copies) {
    // A product takes too long to save bits; the next layer may still ask for it.
    if ((HasBits<A> && is_from_product(input)) || !output_tells(input.scalar_type()) ||
        !are_few(layers_to_recompute()) || !prepare_before(copies)) {
      return false;
    }
    read_strides_ = c10::SymDimVector(input.sym_strides());
    return true;
  }

  /// After ask(), and with the output: what grad() reads, while there is room for it.
  void keep_while_room(const at::Tensor& read, double work) { while_room_.set(read, work); }

  static constexpr bool kGradReadsOutput = OutputTells<A> || A::kReads == Reads::output;

  void output_is_kept(const at::Tensor& output) override {
    if constexpr (OutputTells<A>) {
      const std::lock_guard lock(mutex_);
      if (is_released_ || keeps_ == Keeps::output || !output_tells(output.scalar_type())) {
        return;
      }
      saved_ = Kept(without_history(output));
      keeps_ = Keeps::output;
    }
  }

  std::optional<int> layers_to_recompute() const override {
    switch (keeps_) {
      case Keeps::output:
        return 0;
      case Keeps::read:
        return A::kReads == Reads::output ? 0 : 1;
      default:
        return before_.with(next_edge(0));
    }
  }

  bool prepare_to_recompute(bool copies) override {
    const std::lock_guard lock(mutex_);
    return keeps_ == Keeps::output || keeps_ == Keeps::read || prepare_before(copies);
  }

  at::Tensor recompute() override {
    const std::lock_guard lock(mutex_);
    if (keeps_ == Keeps::output) {
      return saved_.lend();
    }
    if constexpr (kGradReadsOutput) {
      return keeps_ == Keeps::read ? saved_.lend(this) : again();
    } else {
      return activation_.value(keeps_ == Keeps::read ? saved_.lend() : again());
    }
  }

  std::string name() const override { return std::string("brim::") + A::kName + "_backward"; }

 private:
  enum class Keeps { nothing, read, bits, output };

  variable_list backward(const at::Tensor& grad) override {
    if (keeps_ == Keeps::nothing) {
      const at::Tensor recomputed = again();
      again_.reset();
      return {activation_.grad(grad, recomputed)};
    }
    again_.reset();
    if constexpr (HasBits<A>) {  // the second derivative is zero
      return {tied_to(next_edge(0), keeps_ == Keeps::bits ? from_bits(grad)
                                                          : activation_.grad(grad, saved_.take()))};
    } else {
      return {
          activation_.grad(grad, kGradReadsOutput ? in_graph(saved_.take(this)) : saved_.take())};
    }
  }

  void forget() override { again_.reset(); }

  void release() override {
    is_released_ = true;
    saved_.release();
    while_room_.reset();
    again_.reset();
  }

  bool output_tells(at::ScalarType type) const {
    if constexpr (OutputTells<A>) {
      return activation_.output_tells(type);
    }
    return true;
  }

  /// Once: in a chain of residual blocks there are many ways to each layer.
  bool prepare_before(bool copies) {
    is_prepared_ = is_prepared_ || nn::prepare_to_recompute(*next_edge(0).function, copies);
    return is_prepared_;
  }

  /// What `grad` reads, from the layer before. In a chain of residual blocks each value is asked
  /// for by its own consumer and by the next block: it is computed once, and held until this node
  /// runs.
  at::Tensor again() {
    at::Tensor value = again_.get();
    if (!value.defined()) {
      value = while_room_.get();
    }
    if (!value.defined()) {
      const TimedAgain timed = while_room_.timed();
      const at::AutoGradMode without(false);
      const Edge& origin = next_edge(0);
      if constexpr (!kGradReadsOutput) {
        value = nn::recompute(origin, read_strides_);
      } else if constexpr (requires { A::recompute(origin, read_strides_); }) {
        value = A::recompute(origin, read_strides_);
      } else {
        value = activation_.value(nn::recompute(origin, read_strides_));
      }
      again_.set(value);
    }
    return kGradReadsOutput ? in_graph(value) : with_history(value, next_edge(0));
  }

  /// The output, which is held without its place in the graph.
  at::Tensor in_graph(const at::Tensor& output) {
    return with_history(output, {compat::pointer_to(*this), 0});
  }

  at::Tensor from_bits(const at::Tensor& grad) {
    const BitRule rule = activation_.bits();
    const at::Tensor result = apply_bits(grad, saved_.take(), strides_, rule.on, rule.off);
    const c10::SymIntArrayRef read = read_strides_.empty() ? strides_ : read_strides_;
    return A::kGradFirst ? as_elementwise(result, grad.sym_strides(), read)
                         : as_elementwise(result, read, grad.sym_strides());
  }

  A activation_;
  Keeps keeps_ = Keeps::nothing;
  bool is_released_ = false;
  bool is_prepared_ = false;
  LayersBefore before_;
  Kept saved_;
  KeptWhileRoom while_room_;
  c10::SymDimVector strides_;       // for which the bits are
  c10::SymDimVector read_strides_;  // of what torch's derivative reads, if it is asked for or they
                                    // are others
  ForThisBackward again_;           // recomputed, between the first asking and apply
};

/// The Autograd kernel. @param input is also the output in place
template <bool InPlace, class A>
// NOLINTNEXTLINE(performance-unnecessary-value-param): written to in place
at::Tensor run_activation(at::Tensor input, const A& activation, Again recompute) {
  const bool needed = needs_grad(input);
  if (InPlace) {
    will_overwrite(input, needed);
  }
  PtrTo<ActivationNode<A>> node;
  bool keeps = false;
  at::Tensor read;  // to be kept while there is room
  double work = 0;
  if (needed) {
    node = make_node<ActivationNode<A>>(input, activation);
    node->set_next_edges(torch::autograd::collect_next_edges(input));
    keeps = !asks_now(recompute) || !node->ask(input, recompute.is_always());
    if (!keeps && recompute.is_if_short() && !ActivationNode<A>::kGradReadsOutput) {
      work = work_to_recompute(input);
      read = InPlace ? below_autograd([&] { return input.clone(); }) : input;
    }
    if (keeps && !HasBits<A> && A::kReads == Reads::input) {
      // As torch does, a copy of what is overwritten. Above autograd, so that a second derivative
      // reaches the input.
      node->keep(InPlace ? input.clone() : input);
      if (!InPlace) {
        tell_producer_kept(input);
      }
    }
  }
  at::Tensor output;
  {
    const BelowAutograd below;
    if constexpr (HasBits<A>) {
      if (keeps) {
        output = node->template run_and_keep_bits<InPlace>(input);
      }
    }
    if (!output.defined()) {
      if constexpr (InPlace) {
        output = activation.value_(input);
      } else {
        output = activation.value(input);
      }
    }
  }
  add_to_graph<InPlace>(output, node);
  if (needed && !keeps && recompute.is_if_short()) {
    node->keep_while_room(read.defined() ? read : output, work);
  }
  if (keeps && !HasBits<A> && A::kReads == Reads::output) {
    node->keep(output, InPlace && output.is_view());
  }
  return output;
}

/// The kernels of an activation's operators. Arguments are the input, A's members and `recompute`.
template <class A, class... Options>
struct ActivationKernels {
  static at::Tensor ours(const at::Tensor& input, Options... options, std::int64_t recompute) {
    return run_activation<false>(input, A{options...}, recompute);
  }

  static at::Tensor torchs(const at::Tensor& input, Options... options,
                           std::int64_t /*recompute*/) {
    return A{options...}.value(input);
  }

  static at::Tensor& ours_(at::Tensor& input, Options... options, std::int64_t recompute) {
    run_activation<true>(input, A{options...}, recompute);
    return input;
  }

  static at::Tensor& torchs_(at::Tensor& input, Options... options, std::int64_t /*recompute*/) {
    return A{options...}.value_(input);
  }
};

/// What autocast does with the input.
template <class A>
constexpr CastTo cast_of() {
  if constexpr (requires { A::kCast; }) {
    return A::kCast;
  }
  return CastTo::nothing;
}

/// The operator of an activation.
template <class A, class... Options>
class Activation {
 public:
  /// @param options of the schema: ", float alpha"
  explicit Activation(const std::string& options = "")
      : operator_(A::kName + ("(Tensor input" + options) + ", int recompute=0) -> Tensor",
                  HasBits<A> ? std::vector{kInGraphs} : std::vector<at::Tag>()) {}

  at::Tensor operator()(const at::Tensor& input, Options... options, Again recompute) const {
    return operator_(input, options..., recompute);
  }

 private:
  using Kernels = ActivationKernels<A, Options...>;

  LayerOperator<&Kernels::ours, &Kernels::torchs, cast_of<A>()> operator_;
};

/// The operator and the one in place, whose name ends in "_". That may read something else.
template <class A, class InPlace, class... Options>
class ActivationWithInPlace {
 public:
  explicit ActivationWithInPlace(const std::string& options = "")
      : operator_(options),
        in_place_(A::kName + ("_(Tensor(a!) input" + options) +
                  ", int recompute=0) -> Tensor(a!)") {}

  at::Tensor operator()(const at::Tensor& input, Options... options, bool inplace,
                        Again recompute) const {
    at::Tensor target = input;
    return inplace ? in_place_(target, options..., recompute)
                   : operator_(input, options..., recompute);
  }

 private:
  using Kernels = ActivationKernels<InPlace, Options...>;

  Activation<A, Options...> operator_;
  LayerOperator<&Kernels::ours_, &Kernels::torchs_> in_place_;
};

}  // namespace brim::nn
