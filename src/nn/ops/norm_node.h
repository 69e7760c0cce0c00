#pragma once

#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>

#include "nn/autograd/node.h"
#include "nn/autograd/operand.h"
#include "nn/autograd/optional_tensor.h"
#include "nn/autograd/storage_pinning.h"
#include "nn/ops/channels.h"

// The node of LayerNorm, GroupNorm and the RMS norms, and what it shares with that of batch norm.

namespace brim::nn {

/// What a normalisation gave. The statistics are what its node keeps; they may be undefined.
struct Normalised {
  at::Tensor output;
  at::Tensor mean;
  at::Tensor rstd;  // 1 / standard deviation
};

/// Gradient of a value before it was normalised over `dims`, in differentiable ATen operators.
/// @param grad of the normalised value
/// @param normal the normalised value itself, (value - mean) * rstd or, not `centred`, value * rstd
[[nodiscard]] inline at::Tensor before_norm(const at::Tensor& grad, const at::Tensor& normal,
                                            const at::Tensor& rstd, at::IntArrayRef dims,
                                            bool centred) {
  const at::Tensor from = centred ? grad.sub(grad.mean(dims, true)) : grad;
  return from.sub(normal.mul(grad.mul(normal).mean(dims, true))).mul(rstd);
}

/// The number that a row is multiplied by in an RMS norm over `dims`, in differentiable ATen
/// operators.
[[nodiscard]] inline at::Tensor rms_rstd(const at::Tensor& wide_input, at::IntArrayRef dims,
                                         double eps) {
  return wide_input.pow(2).mean(dims, true).add(eps).rsqrt();
}

using TwoTensors = std::tuple<at::Tensor, at::Tensor>;

/// Room for the gradients of an RMS norm that are asked for.
[[nodiscard]] inline TwoTensors grads_like(const at::Tensor& input, const MaybeTensor& weight,
                                           bool input_grad, bool weight_grad) {
  const auto like = [](const at::Tensor& tensor) {
    return at::empty_like(tensor, {}, at::MemoryFormat::Contiguous);
  };
  return {input_grad ? like(input) : at::Tensor(), weight_grad ? like(*weight) : at::Tensor()};
}

/// @throws c10::Error as torch does, where `shape` is not that of the input's last dimensions or of
/// a weight.
inline void check_normalized_shape(const at::Tensor& input, at::IntArrayRef shape,
                                   const MaybeTensor& weight, const MaybeTensor& bias = {}) {
  TORCH_CHECK(!shape.empty(), "Expected normalized_shape to be at least 1-dimensional, but got ",
              shape);
  const auto wanted = c10::fromIntArrayRefSlow(shape);
  for (const MaybeTensor* const each : {&weight, &bias}) {
    const char* const name = each == &weight ? "weight" : "bias";
    TORCH_CHECK(!is_given(*each) || (*each)->sym_sizes().equals(wanted), "Expected ", name,
                " to be of same shape as normalized_shape, but got ", name, " of shape ",
                (*each)->sym_sizes(), " and normalized_shape = ", shape);
  }
  const auto sizes = input.sym_sizes();
  TORCH_CHECK(
      sizes.size() >= shape.size() && sizes.slice(sizes.size() - shape.size()).equals(wanted),
      "Given normalized_shape=", shape, ", expected input with shape [*, ", shape,
      "], but got input of size ", sizes);
}

/// Whether there may be a kernel on CUDA that gives the output again, in this type, from statistics
/// and weights in float32.
[[nodiscard]] inline bool runs_again_as(at::ScalarType type, const at::Tensor& input,
                                        const MaybeTensor& weight, const MaybeTensor& bias) {
  const auto is_float32 = [](const MaybeTensor& tensor) {
    return !is_given(tensor) || tensor->scalar_type() == at::kFloat;
  };
  return input.is_cuda() && !is_traced(input) && !is_wrapped(input) &&
         input.scalar_type() != at::kDouble && is_float32(weight) && is_float32(bias) &&
         (type == at::kFloat || type == at::kHalf || type == at::kBFloat16);
}

/// The input as the layer calculates with it.
[[nodiscard]] inline at::Tensor widened(const at::Tensor& input, bool as_float32) {
  return as_float32 ? input.to(at::kFloat) : input;
}

/// What the nodes of all normalisations share: input, statistics and references to the weights. A
/// product that offers to run again gives the input instead.
class StatisticsNode : public SavingNode {
 public:
  StatisticsNode(const at::Tensor& input, const MaybeTensor& bias)
      : input_(input), bias_type_(is_given(bias) ? bias->scalar_type() : at::kFloat) {}

  std::optional<int> layers_to_recompute() const override {
    return reads_input_ ? input_.layers() : std::nullopt;
  }

 protected:
  /// At forward, if backward reads the input.
  void keep_input(const at::Tensor& input, const MaybeTensor& bias, const at::Tensor& mean,
                  const at::Tensor& rstd) {
    reads_input_ = true;
    input_.keep(input, is_worth_asking_for(input));
    bias_ = kept(bias);
    mean_ = kept(maybe(mean));
    rstd_ = kept(maybe(rstd));
  }

  /// Which gradients are asked for.
  [[nodiscard]] std::array<bool, 3> mask() const {
    return {task_should_compute_output(0), task_should_compute_output(1),
            task_should_compute_output(2)};
  }

  void forget() override { input_.forget(); }

  void release() override {
    input_.release();
    for (Kept* const each : {&weight_, &bias_, &mean_, &rstd_}) {
      each->release();
    }
  }

  Operand input_;
  bool reads_input_ = false;  // in backward
  at::ScalarType bias_type_;
  Kept weight_;
  Kept bias_;
  Kept mean_;
  Kept rstd_;
};

template <class Kind>
at::Tensor run_with_node(const Kind& kind, const at::Tensor& given, const MaybeTensor& weight,
                         const MaybeTensor& bias, bool as_float32 = false);

/// Keeps nothing if only the bias needs a gradient. What is particular to a layer is in `Kind`,
/// which the node copies:
///
///     static constexpr const char* kName;
///     static constexpr bool kReadsBias;  // in backward
///     Normalised run(input, weight, bias) const;
///     bool keeps_statistics(input, weight, as_float32) const;  // or computes them in backward
///     NormGrads backward(grad, input, weight, bias, statistics, mask) const;  the bias's may lack
///     at::Tensor bias_grad(grad, type) const;
///     at::Tensor run_as(type, given, input, weight, bias, statistics) const;  optional: the
///     output,
///         which was `given`, again in any type; undefined if there is no kernel for it
///
/// With `as_float32` the input is in low precision, kept as it is, and cast for `run` and
/// `backward` alone: the kernels and the casts are torch's, so the values are too.
template <class Kind>
class NormNode final : public StatisticsNode {
 public:
  NormNode(Kind kind, const at::Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias,
           bool as_float32)
      : StatisticsNode(input, bias),
        kind_(std::move(kind)),
        as_float32_(as_float32),
        weights_((is_given(weight) ? 1 : 0) + (is_given(bias) ? 1 : 0)) {}

  void keep(const at::Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias,
            const Normalised& result) {
    type_ = result.output.scalar_type();
    weight_ = kept(weight);
    const bool keeps = kind_.keeps_statistics(input, weight, as_float32_);
    keep_input(input, bias, keeps ? result.mean : at::Tensor(), keeps ? result.rstd : at::Tensor());
  }

  bool prepare_to_recompute(bool copies) override {
    const std::lock_guard lock(mutex_);
    ++askers_;
    // The copies are no larger than what the next layer does not keep.
    const c10::SymInt most = elements() / std::max(1, weights_);
    return input_.ask(copies) && (!copies || Kept::freeze(weight_, bias_, most));
  }

  at::Tensor recompute() override {
    const std::lock_guard lock(mutex_);
    at::Tensor output = again_.get();
    if (!output.defined()) {
      output = from_statistics(type_);
      if (!output.defined()) {
        output = run_with_node(kind_, input_.lend(), maybe(weight_.lend()), maybe(bias_.lend()),
                               as_float32_);
      }
      if (askers_ > 1) {  // such as the projections to query, key and value
        again_.set(output);
      }
    }
    return output;
  }

  std::optional<at::Tensor> recompute_as(at::ScalarType type) override {
    const std::lock_guard lock(mutex_);
    at::Tensor output = again_as_.get();
    if (!output.defined() || output.scalar_type() != type) {
      output = from_statistics(type);
      if (askers_ > 1) {
        again_as_.set(output);
      }
    }
    return maybe(output);
  }

  void will_release_variables() override { retains_ = false; }

  std::string name() const override { return Kind::kName; }

 private:
  variable_list backward(const at::Tensor& grad) override {
    forget_output();
    variable_list result(3);
    if (!reads_input_) {
      result[2] = kind_.bias_grad(grad, bias_type_);
      return result;
    }
    const std::array<bool, 3> mask = this->mask();
    const Normalised statistics{{}, mean_.take(), rstd_.take()};
    // What is not read may have been changed since forward, as in torch.
    const MaybeTensor bias = Kind::kReadsBias ? maybe(bias_.take()) : MaybeTensor();
    at::Tensor input = input_.take();
    const at::ScalarType type = input.scalar_type();
    if (as_float32_) {
      input = widened(input, true);
      if (!retains_) {
        input_
            .release();  // or there would be both copies beside the gradients, where torch has one
      }
    }
    std::tie(result[0], result[1], result[2]) =
        kind_.backward(grad, input, maybe(weight_.take()), bias, statistics, mask);
    input.reset();
    if (as_float32_ && mask[0]) {
      result[0] = result[0].to(type);
    }
    if (mask[2] && !result[2].defined()) {
      result[2] = kind_.bias_grad(grad, bias_type_);
    }
    return result;
  }

  void forget() override {
    forget_output();
    StatisticsNode::forget();
  }

  void release() override {
    forget_output();
    StatisticsNode::release();
  }

  void forget_output() {
    again_.reset();
    again_as_.reset();
  }

  /// Undefined if there is no kernel for it.
  at::Tensor from_statistics(at::ScalarType type) {
    if constexpr (requires { &Kind::run_as; }) {
      return kind_.run_as(type, type_, input_.lend(), maybe(weight_.lend()), maybe(bias_.lend()),
                          {{}, mean_.lend(), rstd_.lend()});
    }
    return {};
  }

  Kind kind_;
  bool as_float32_;
  bool retains_ = true;  // what is kept, after this backward
  int weights_;
  int askers_ = 0;
  at::ScalarType type_ = at::kFloat;  // of the output
  // The output, and that in another type, between the first of several askers and backward().
  ForThisBackward again_;
  ForThisBackward again_as_;
};

/// A low precision input as the node keeps it, if there will be one. Of a part of a larger tensor
/// torch keeps a copy too, in float32.
[[nodiscard]] inline at::Tensor unpinned(const at::Tensor& input, const MaybeTensor& weight,
                                         const MaybeTensor& bias) {
  return is_recorded(input, weight, bias) && pins_more_than_itself(input) ? input.clone() : input;
}

/// The normalisation, with a node if something needs a gradient and this is not below autograd.
/// @param as_float32 of an input in low precision, which is kept as it is
template <class Kind>
at::Tensor run_with_node(const Kind& kind, const at::Tensor& given, const MaybeTensor& weight,
                         const MaybeTensor& bias, bool as_float32) {
  const at::Tensor input = as_float32 ? unpinned(given, weight, bias) : given;
  PtrTo<NormNode<Kind>> node;
  if (is_recorded(input, weight, bias)) {
    node = make_node<NormNode<Kind>>(kind, input, weight, bias, as_float32);
    node->set_next_edges(torch::autograd::collect_next_edges(input, weight, bias));
  }
  Normalised result =
      below_autograd([&] { return kind.run(widened(input, as_float32), weight, bias); });
  if (node) {
    if (input.requires_grad() || trains(weight)) {
      node->keep(input, weight, bias, result);
    }
  }
  add_to_graph<false>(result.output, node);
  return std::move(result.output);
}

}  // namespace brim::nn
