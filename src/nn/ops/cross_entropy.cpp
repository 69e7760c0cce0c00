#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty_like.h>
#include <brim/memory/out_of_memory.h>
#include <brim/nn/losses.h>

#include <optional>
#include <utility>

#include "mean_count.h"
#include "nn/autograd/operator.h"
#include "nn/autograd/optional_tensor.h"
#include "nn/autograd/rerun.h"
#include "nn/autograd/slots.h"
#include "nn/ops/cross_entropy_rows.h"

// torch keeps the log-softmax of all logits, in float32 where the model cast them before. Here the
// logits are kept as the model made them or, where the layer that made them can run again, nothing.

namespace brim::nn {
namespace {

at::Tensor torch_cross_entropy(const at::Tensor& input, const at::Tensor& target,
                               const MaybeTensor& weight, std::int64_t reduction,
                               std::int64_t ignore_index, double label_smoothing, bool in_float32,
                               std::int64_t /*recompute*/) {
  return at::cross_entropy_loss(in_float32 ? input.to(at::kFloat) : input, target,
                                is_given(weight) ? weight : MaybeTensor(), reduction, ignore_index,
                                label_smoothing);
}

/// Whether the operators over rows do it; everything else is left to torch's function.
bool is_of_rows(const at::Tensor& input, const at::Tensor& target, const MaybeTensor& weight,
                double label_smoothing) {
  return input.dim() == 2 && target.dim() == 1 && target.scalar_type() == at::kLong &&
         target.sym_size(0) == input.sym_size(0) && input.sym_numel() > 0 && !is_given(weight) &&
         label_smoothing == 0.0 && input.device() == target.device();
}

class CrossEntropyNode final : public SavingNode, public CountedMean {
 public:
  CrossEntropyNode(std::int64_t reduction, std::int64_t ignore_index, double label_smoothing,
                   bool in_float32)
      : reduction_(reduction),
        ignore_index_(ignore_index),
        label_smoothing_(label_smoothing),
        in_float32_(in_float32) {}

  /// At forward, below autograd, for logits that torch's function takes.
  at::Tensor run(const at::Tensor& logits, const at::Tensor& target, const MaybeTensor& weight) {
    return torch_cross_entropy(logits, target, weight, reduction_, ignore_index_, label_smoothing_,
                               in_float32_, false);
  }

  /// The same where is_of_rows().
  at::Tensor run_rows(const at::Tensor& logits, const at::Tensor& target) {
    is_of_rows_ = true;
    auto [losses, log_sums] = cross_entropy_rows(logits, target, ignore_index_, in_float32_);
    if (log_sums.defined()) {
      log_sums_ = Kept(log_sums);
    }
    if (reduction_ == at::Reduction::None) {
      return losses;
    }
    auto [loss, total] = reduce_rows(losses, target, reduction_, ignore_index_);
    if (reduction_ == at::Reduction::Mean) {
      total_ = Kept(total);
    }
    return loss;
  }

  /// At forward.
  void keep(const at::Tensor& logits, const at::Tensor& target, const MaybeTensor& weight,
            Again recompute) {
    target_ = Kept(target);
    weight_ = kept(weight);
    if (asks_now(recompute) && prepare_maker_for_loss(logits, recompute.is_always())) {
      origin_ = origin_of(logits);
      if (recompute.is_if_short()) {
        while_room_.set(logits, work_of_maker(logits));
      }
      return;
    }
    if (logits.scalar_type() == working_type(logits, in_float32_)) {
      log_sums_ = Kept();  // together with the logits more than torch keeps
    }
    tell_producer_kept(logits);
    logits_ = Kept(logits);
  }

  void will_release_variables() override { retains_ = false; }

  std::string name() const override { return "brim::cross_entropy_backward"; }

  std::optional<double> mean_count() override {
    if (reduction_ != at::Reduction::Mean) {
      return std::nullopt;
    }
    const at::Tensor target = target_.take();
    if (target.is_floating_point()) {  // probabilities of the classes
      const std::int64_t classes = target.size(target.dim() == 1 ? 0 : 1);
      return static_cast<double>(target.numel()) / static_cast<double>(classes);
    }
    return labels_counted(target, weight_.take(), ignore_index_);
  }

 private:
  variable_list backward(const at::Tensor& grad) override {
    // Backward may be called inside of a region of autocast.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    at::Tensor logits = take_logits();
    if (!is_of_rows_) {
      const at::Tensor target = target_.take();
      const MaybeTensor weight = maybe(weight_.take());
      const AutocastState autocast(logits.device().type());
      variable_list inputs(1);
      inputs[0] = std::move(logits);
      if (!retains_) {
        logits_.release();  // torch has the log-softmax in their place
      }
      return grads_by_rerun(
          [&](const variable_list& given) { return run(given[0], target, weight); },
          std::move(inputs), grad, {true}, autocast);
    }
    const at::Tensor target = target_.take();
    const MaybeTensor total = maybe(total_.take());
    const bool is_batched = grad.key_set().has_any(
        c10::DispatchKeySet({c10::DispatchKey::Batched, c10::DispatchKey::FuncTorchBatched}));
    if (at::GradMode::is_enabled() || is_batched) {  // no one result to write into
      const at::ScalarType type = working_type(logits, in_float32_);
      return {cross_entropy_rows_grad(grad, logits, target, total, reduction_, ignore_index_, type)
                  .to(logits.scalar_type())};
    }
    at::Tensor result = is_ours_ && logits.is_contiguous()
                            ? logits
                            : at::empty_like(logits, at::MemoryFormat::Contiguous);
    cross_entropy_rows_backward(grad, logits, target, maybe(log_sums_.take()), total, reduction_,
                                ignore_index_, in_float32_, result);
    return {std::move(result)};
  }

  void release() override {
    for (Kept* const each : {&logits_, &target_, &weight_, &total_, &log_sums_}) {
      each->release();
    }
    while_room_.reset();
    is_released_ = true;
  }

  at::Tensor take_logits() {
    is_ours_ = false;
    if (is_released_ || origin_.is_valid()) {
      TORCH_CHECK(!is_released_, torch::autograd::ERR_BACKWARD_TWICE);
      const at::Tensor kept = while_room_.get();
      if (kept.defined()) {
        if (!retains_ && !at::GradMode::is_enabled()) {
          while_room_.reset();
          is_ours_ = is_held_once(kept);
        }
        return with_history(kept, origin_);
      }
      is_ours_ = true;
      const TimedAgain timed = while_room_.timed();
      return with_history(nn::recompute(origin_), origin_);
    }
    try {
      return logits_.take();
    } catch (const c10::Error& error) {
      if (is_out_of_memory(error)) {
        throw;
      }
      TORCH_CHECK(false,
                  "brim's cross_entropy keeps the logits themselves for backward, and they were "
                  "written to since: write to a copy (logits.clone()). ",
                  error.what_without_backtrace());
    }
  }

  std::int64_t reduction_;
  std::int64_t ignore_index_;
  double label_smoothing_;
  bool in_float32_;
  bool is_of_rows_ = false;
  bool is_released_ = false;
  bool retains_ = true;   // what is kept, after this backward
  bool is_ours_ = false;  // the logits of this backward: nobody else looks at them
  Kept logits_;
  KeptWhileRoom while_room_;  // logits that can be recomputed
  // Made the logits, if they are not kept. It is at this node's edge, so this makes no circle.
  Edge origin_;
  Kept target_;
  Kept weight_;
  Kept total_;
  Kept log_sums_;
};

/// Dense tensors of class numbers, or of probabilities.
bool is_known_target(const at::Tensor& target) {
  const c10::DispatchKeySet keys = target.key_set();
  return is_known(target) || (target.scalar_type() == at::kLong &&
                              ((keys | kKnownKeys) == kKnownKeys || is_known_otherwise(target)));
}

at::Tensor cross_entropy_below(const at::Tensor& input, const at::Tensor& target,
                               const MaybeTensor& weight, std::int64_t reduction,
                               std::int64_t ignore_index, double label_smoothing, bool in_float32,
                               std::int64_t recompute) {
  if (!is_known(input) || !is_known_target(target) ||
      !is_of_rows(input, target, weight, label_smoothing)) {
    return torch_cross_entropy(input, target, weight, reduction, ignore_index, label_smoothing,
                               in_float32, recompute);
  }
  const at::Tensor losses =
      std::get<0>(cross_entropy_rows(input, target, ignore_index, in_float32));
  return reduction == at::Reduction::None
             ? losses
             : std::get<0>(reduce_rows(losses, target, reduction, ignore_index));
}

at::Tensor cross_entropy_autograd(const at::Tensor& input, const at::Tensor& target,
                                  const MaybeTensor& weight, std::int64_t reduction,
                                  std::int64_t ignore_index, double label_smoothing,
                                  bool in_float32, std::int64_t recompute) {
  if (in_float32 && input.scalar_type() == at::kDouble) {
    return cross_entropy_autograd(input.to(at::kFloat), target, weight, reduction, ignore_index,
                                  label_smoothing, false, recompute);
  }
  if (!needs_grad(input, target, weight)) {
    const BelowAutograd below;
    return cross_entropy_below(input, target, weight, reduction, ignore_index, label_smoothing,
                               in_float32, recompute);
  }
  const bool of_rows = is_of_rows(input, target, weight, label_smoothing);
  // The derivative by the others is torch's, and torch.func sees no graph inside of a node.
  if (!is_known(input) || !is_known_target(target) || !is_known(weight) ||
      needs_grad(target, weight) || (!of_rows && is_wrapped(input))) {
    return torch_cross_entropy(input, target, weight, reduction, ignore_index, label_smoothing,
                               in_float32, recompute);
  }
  auto node = make_node<CrossEntropyNode>(reduction, ignore_index, label_smoothing, in_float32);
  node->set_next_edges(torch::autograd::collect_next_edges(input));
  at::Tensor loss = below_autograd(
      [&] { return of_rows ? node->run_rows(input, target) : node->run(input, target, weight); });
  node->keep(input, target, weight, recompute);
  add_to_graph<false>(loss, node);
  return loss;
}

/// Not a LayerOperator, which would leave every call with class numbers to torch.
using CrossEntropy = Dispatched<cross_entropy_autograd>;

/// As torch does on the CPU. On CUDA torch rounds the log-softmax to the low type first.
template <c10::DeviceType Device>
at::Tensor cross_entropy_autocast(const at::Tensor& input, const at::Tensor& target,
                                  const MaybeTensor& weight, std::int64_t reduction,
                                  std::int64_t ignore_index, double label_smoothing,
                                  bool in_float32, std::int64_t recompute) {
  const Autocast autocast(Device);
  const bool is_low = input.scalar_type() == at::kHalf || input.scalar_type() == at::kBFloat16;
  return CrossEntropy::call(input, autocast.cast(at::kFloat, target),
                            autocast.cast(at::kFloat, weight), reduction, ignore_index,
                            label_smoothing, in_float32 || is_low, recompute);
}

const CrossEntropy kCrossEntropy(
    "cross_entropy(Tensor input, Tensor target, Tensor? weight, int reduction, int ignore_index, "
    "float label_smoothing, bool in_float32, int recompute) -> Tensor",
    {},
    {{c10::DispatchKey::Autograd, cross_entropy_autograd},
     {c10::DispatchKey::CompositeExplicitAutograd, cross_entropy_below},
     {c10::DispatchKey::CompositeImplicitAutogradNestedTensor, torch_cross_entropy},
     {c10::DispatchKey::FuncTorchBatched, torch_cross_entropy},
     {c10::DispatchKey::AutocastCPU, cross_entropy_autocast<at::kCPU>},
     {c10::DispatchKey::AutocastCUDA, cross_entropy_autocast<at::kCUDA>}});

}  // namespace

at::Tensor functional::cross_entropy(const at::Tensor& input, const at::Tensor& target,
                                     const MaybeTensor& weight, std::int64_t ignore_index,
                                     std::string_view reduction, double label_smoothing,
                                     bool in_float32, Again recompute) {
  return kCrossEntropy(input, target, weight, reduction_named(reduction), ignore_index,
                       label_smoothing, in_float32, recompute);
}

}  // namespace brim::nn
