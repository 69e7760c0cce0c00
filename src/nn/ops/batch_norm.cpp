#include <ATen/Context.h>
#include <ATen/ops/_batch_norm_impl_index.h>
#include <ATen/ops/_batch_norm_impl_index_backward.h>
#include <ATen/ops/_native_batch_norm_legit.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <brim/nn/functional.h>

#include <algorithm>
#include <initializer_list>

#include "nn/autograd/operator.h"
#include "nn/autograd/saved_statistic.h"
#include "nn/ops/batch_norm_kernels.h"
#include "nn/ops/norm_node.h"

namespace brim::nn {
namespace {

struct BatchNormResult {
  at::Tensor output;
  at::Tensor mean;
  at::Tensor invstd;
  at::Tensor reserve;     // cuDNN's own
  std::int64_t impl = 0;  // which of torch's implementations ran
};

/// Whether torch's own function would choose its own kernel, after checks of sizes that pass.
bool is_plain(const at::Tensor& input, std::initializer_list<const MaybeTensor*> params,
              bool has_statistics) {
  return input.is_cpu() && !is_traced(input) && has_statistics &&
         std::ranges::all_of(params, [&](const MaybeTensor* param) {
           return !is_given(*param) || (*param)->sym_numel() == input.sym_size(1);
         });
}

/// Dispatches as at::batch_norm does.
BatchNormResult run(const at::Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias,
                    const MaybeTensor& running_mean, const MaybeTensor& running_var, bool training,
                    double momentum, double eps) {
  BatchNormResult result;
  if (training) {
    for (const MaybeTensor* const each : {&running_mean, &running_var}) {
      if (is_given(*each)) {
        copy_for_readers(**each);
      }
    }
  }
  // Tracers must see that the running statistics change.
  if (training && is_given(running_mean) && is_given(running_var) && is_traced(input)) {
    at::Tensor mean = *running_mean;
    at::Tensor var = *running_var;
    std::tie(result.output, result.mean, result.invstd) =
        at::_native_batch_norm_legit(input, weight, bias, mean, var, true, momentum, eps);
    return result;
  }
  if (is_plain(input, {&weight, &bias, &running_mean, &running_var},
               training || (is_given(running_mean) && is_given(running_var)))) {
    std::tie(result.output, result.mean, result.invstd) = at::native_batch_norm(
        input, weight, bias, running_mean, running_var, training, momentum, eps);
    return result;
  }
  std::tie(result.output, result.mean, result.invstd, result.reserve, result.impl) =
      at::_batch_norm_impl_index(input, weight, bias, running_mean, running_var, training, momentum,
                                 eps, at::globalContext().userEnabledCuDNN());
  return result;
}

class BatchNormNode final : public StatisticsNode {
 public:
  BatchNormNode(const at::Tensor& input, const MaybeTensor& bias, bool training, double eps)
      : StatisticsNode(input, bias), training_(training), eps_(eps) {}

  /// For the gradient of the weight, or of an input in training: everything that torch keeps.
  void keep_all(const at::Tensor& input, const MaybeTensor& bias, const BatchNormResult& result,
                const MaybeTensor& running_mean) {
    keep_input(input, bias, result.mean, result.invstd);
    reserve_ = kept(maybe(result.reserve));
    impl_ = result.impl;
    if (!training_) {
      running_mean_.keep(*running_mean);
    }
  }

  /// References: no bytes.
  void keep_factors(const at::Tensor& input, const MaybeTensor& weight,
                    const MaybeTensor& running_var) {
    format_ = input.suggest_memory_format();
    weight_ = kept(weight);
    if (!training_) {
      running_var_.keep(*running_var);
    }
  }

  /// In training, what forward updated: kernels choose the type of the batch's statistics by that
  /// of the running ones.
  void remember_updated(const MaybeTensor& running_mean, const MaybeTensor& running_var) {
    const auto options_of = [](const MaybeTensor& statistic) {
      return is_given(statistic) ? std::optional(statistic->options()) : std::nullopt;
    };
    updated_ = {options_of(running_mean), options_of(running_var)};
  }

  bool prepare_to_recompute(bool copies) override {
    const std::lock_guard lock(mutex_);
    // The copies are no larger than what the next layer does not keep.
    const c10::SymInt most = elements() / (training_ ? 2 : 4);
    // Running statistics are written to without a new version.
    return input_.ask(copies) && (!copies || Kept::freeze(weight_, bias_, most)) &&
           running_mean_.freeze(most) && running_var_.freeze(most);
  }

  at::Tensor recompute() override {
    const std::lock_guard lock(mutex_);
    auto output = again({}, false);
    return output ? *std::move(output) : run_again();
  }

  std::optional<at::Tensor> recompute_relu(const at::Tensor& added) override {
    const std::lock_guard lock(mutex_);
    return again(added, true);
  }

  void will_release_variables() override { retains_ = false; }

  std::string name() const override { return "brim::batch_norm_backward"; }

 private:
  variable_list backward(const at::Tensor& grad) override {
    variable_list result(3);
    if (reads_input_) {
      std::tie(result[0], result[1], result[2]) = from_input(grad);
      return result;
    }
    if (task_should_compute_output(0)) {
      result[0] = scale_channels(is_traced(grad) ? grad : grad.contiguous(format_),
                                 maybe(weight_.take()), running_var_.take(), eps_);
      result[0] = tied_to(next_edge(0), result[0], false);
    }
    if (task_should_compute_output(2)) {
      result[2] = sum_over_channels(grad, bias_type_);
    }
    return result;
  }

  void release() override {
    StatisticsNode::release();
    reserve_.release();
    running_mean_.release();
    running_var_.release();
  }

  /// The call of forward. In training without running statistics, so that nothing is updated a
  /// second time; in low precision with room that nobody reads in their place.
  at::Tensor run_again() {
    const at::Tensor input = input_.lend();
    const bool may_mix = at::isReducedFloatingType(input.scalar_type());
    const auto room_for = [&](const std::optional<at::TensorOptions>& updated) {
      return updated && may_mix ? MaybeTensor(at::empty_symint({input.sym_size(1)}, *updated))
                                : MaybeTensor();
    };
    return run(input, maybe(weight_.lend()), maybe(bias_.lend()),
               training_ ? room_for(updated_[0]) : maybe(running_mean_.lend()),
               training_ ? room_for(updated_[1]) : maybe(running_var_.lend()), training_, 0, eps_)
        .output;
  }

  std::optional<at::Tensor> again(const at::Tensor& added, bool relu) {
    const at::Tensor input = input_.lend();
    if (!input.is_cuda() || is_wrapped(input) || is_traced(input)) {
      return std::nullopt;
    }
    const NormOf norm{input,
                      maybe(weight_.lend()),
                      maybe(bias_.lend()),
                      training_ ? mean_.lend() : running_mean_.lend(),
                      training_ ? rstd_.lend() : running_var_.lend(),
                      training_ ? -1.0 : eps_};
    return batch_norm_again(norm, added, relu, [this] { return run_again(); });
  }

  NormGrads from_input(const at::Tensor& grad) {
    const std::array<bool, 3> mask = this->mask();
    const at::Tensor input = input_.take();
    const MaybeTensor weight = maybe(weight_.take());
    const MaybeTensor running_mean = maybe(running_mean_.take());
    const MaybeTensor running_var = maybe(running_var_.take());
    if (!training_ && input.is_cuda() && !at::GradMode::is_enabled()) {
      return batch_norm_eval_backward(grad, input, weight, *running_mean, *running_var, eps_, mask);
    }
    const MaybeTensor mean = maybe(mean_.take());
    const MaybeTensor invstd = maybe(rstd_.take());
    if (impl_ == 0) {  // the other function takes no symbolic sizes
      return at::native_batch_norm_backward(grad, input, weight, running_mean, running_var, mean,
                                            invstd, training_, eps_, mask);
    }
    at::Tensor reserve = reserve_.take();
    if (retains_ && reserve.defined()) {
      reserve = reserve.clone();  // cuDNN writes to it
    }
    // cuDNN's takes no gaps. Forward made a copy too, which torch keeps.
    const auto format = input.suggest_memory_format();
    return at::_batch_norm_impl_index_backward(
        impl_, input.contiguous(format), grad.contiguous(format), weight, running_mean, running_var,
        mean, invstd, training_, eps_, mask, reserve);
  }

  bool training_;
  bool retains_ = true;
  at::MemoryFormat format_ = at::MemoryFormat::Contiguous;
  double eps_;
  std::int64_t impl_ = 0;
  std::array<std::optional<at::TensorOptions>, 2> updated_;  // running mean and variance
  KeptStatistic running_mean_;
  KeptStatistic running_var_;
  Kept reserve_;
};

/// One value per channel has no variance. torch's Python function says so, its operator does not.
void check_values_per_channel(const at::Tensor& input) {
  const auto sizes = input.sym_sizes();
  c10::SymInt values = sizes.empty() ? c10::SymInt(1) : sizes[0];
  for (std::size_t i = 2; i < sizes.size(); ++i) {
    values = values * sizes[i];
  }
  TORCH_CHECK_VALUE(values != 1,
                    "Expected more than 1 value per channel when training, got input size ", sizes);
}

void check(const at::Tensor& input, bool training) {
  TORCH_CHECK(input.dim() >= 2, "batch_norm takes input of 2 or more dimensions, got ",
              input.dim());
  if (training) {
    check_values_per_channel(input);
  }
}

/// torch's own, which keeps what torch keeps.
at::Tensor torch_batch_norm(const at::Tensor& input, const MaybeTensor& weight,
                            const MaybeTensor& bias, const MaybeTensor& running_mean,
                            const MaybeTensor& running_var, bool training, double momentum,
                            double eps) {
  return at::batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps,
                        at::globalContext().userEnabledCuDNN());
}

at::Tensor batch_norm_autograd(const at::Tensor& input, const MaybeTensor& weight,
                               const MaybeTensor& bias, const MaybeTensor& running_mean,
                               const MaybeTensor& running_var, bool training, double momentum,
                               double eps) {
  check(input, training);
  if (input.sym_numel() == 0) {  // there is nothing to save, and torch has rules of its own for it
    return torch_batch_norm(input, weight, bias, running_mean, running_var, training, momentum,
                            eps);
  }
  PtrTo<BatchNormNode> node;
  if (is_recorded(input, weight, bias)) {
    node = make_node<BatchNormNode>(input, bias, training, eps);
    node->set_next_edges(torch::autograd::collect_next_edges(input, weight, bias));
  }
  BatchNormResult result = below_autograd(
      [&] { return run(input, weight, bias, running_mean, running_var, training, momentum, eps); });
  if (!node) {
    return std::move(result.output);
  }
  if (trains(weight) || (training && input.requires_grad())) {
    node->keep_all(input, bias, result, running_mean);
    node->keep_factors(input, weight, running_var);
    if (training) {
      node->remember_updated(running_mean, running_var);
    }
  } else if (input.requires_grad()) {
    node->keep_factors(input, weight, running_var);
  }
  add_to_graph<false>(result.output, node);
  return std::move(result.output);
}

const LayerOperator<batch_norm_autograd, torch_batch_norm, CastTo::nothing, batch_norm_autograd>
    kBatchNorm(
        "batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? "
        "running_var, bool training, float momentum, float eps) -> Tensor");

}  // namespace

at::Tensor functional::batch_norm(const at::Tensor& input, const MaybeTensor& running_mean,
                                  const MaybeTensor& running_var, const MaybeTensor& weight,
                                  const MaybeTensor& bias, bool training, double momentum,
                                  double eps) {
  return kBatchNorm(input, weight, bias, running_mean, running_var, training, momentum, eps);
}

}  // namespace brim::nn
