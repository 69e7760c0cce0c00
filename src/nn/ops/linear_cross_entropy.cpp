#include <ATen/ops/addmm.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <brim/memory/stats.h>
#include <brim/nn/losses.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "mean_count.h"
#include "nn/autograd/operator.h"
#include "nn/autograd/optional_tensor.h"
#include "nn/autograd/rerun.h"
#include "nn/ops/cross_entropy_rows.h"

// The last linear layer of a model and its loss. The logits never exist as a whole and nothing of
// their size, or of the weight's, is kept between forward and backward.
//
// Forward goes through parts of the rows and keeps one number per row, the logarithm of its sum of
// exponentials. With it backward can go through parts of the classes: the gradient of a part of the
// weight is then complete, so only the gradient of the input is a sum over the parts. (Parts of the
// rows would need a sum in float32 that is as large as the weight.)

namespace brim::nn {
namespace {

/// What is done with a product of rows and weights.
struct Options {
  std::int64_t reduction;
  std::int64_t ignore_index;
  double label_smoothing;
  double scale;
  double softcap;  // 0: none
  bool in_float32;
  bool cast_weights;   // to the type of the input, part by part
  std::int64_t chunk;  // rows at once; 0: as many as fit
};

at::ScalarType wide_type(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

MaybeTensor cast_bias(const MaybeTensor& bias, at::ScalarType type) {
  return is_given(bias) ? MaybeTensor(bias->to(type)) : MaybeTensor();
}

at::Tensor logits_of(const at::Tensor& input, const at::Tensor& weight, const MaybeTensor& bias,
                     const Options& options) {
  at::Tensor logits =
      is_given(bias) ? at::addmm(*bias, input, weight.t()) : at::mm(input, weight.t());
  if (options.scale != 1.0) {
    logits.mul_(options.scale);
  }
  if (options.softcap != 0.0) {
    logits.div_(options.softcap).tanh_().mul_(options.softcap);
  }
  return logits;
}

/// The same and its loss, by torch's operators: differentiable as often as wanted.
at::Tensor plain(const at::Tensor& input, const at::Tensor& weight, const MaybeTensor& bias,
                 const at::Tensor& target, const MaybeTensor& class_weight,
                 const Options& options) {
  const at::ScalarType type = options.cast_weights ? input.scalar_type() : weight.scalar_type();
  at::Tensor logits = at::linear(input, weight.to(type), cast_bias(bias, type));
  if (options.scale != 1.0) {
    logits = logits.mul(options.scale);
  }
  if (options.softcap != 0.0) {
    logits = logits.div(options.softcap).tanh().mul(options.softcap);
  }
  return at::cross_entropy_loss(options.in_float32 ? logits.to(at::kFloat) : logits, target,
                                is_given(class_weight) ? class_weight : MaybeTensor(),
                                options.reduction, options.ignore_index, options.label_smoothing);
}

/// Into how many parts the logits are divided.
std::int64_t parts_for(const at::Tensor& input, const at::Tensor& weight, const Options& options) {
  const std::int64_t rows = std::max<std::int64_t>(1, input.size(0));
  if (options.chunk > 0) {
    return (rows + options.chunk - 1) / options.chunk;
  }
  if (is_traced(input) || input.is_meta()) {
    return 1;
  }
  // Beside a part its copy in a wide type, where no kernel does without, and the cap's slope.
  const bool is_fused = input.is_cuda() && options.label_smoothing <= 0.0;
  const std::int64_t each = input.element_size() * (options.softcap != 0.0 ? 2 : 1);
  const double bytes = static_cast<double>(rows) * static_cast<double>(weight.size(0)) *
                       static_cast<double>(each + (is_fused ? 0 : 8));
  constexpr double kLeast = 64 << 20;  // smaller products waste the device
  const double room = static_cast<double>(memory_stats(input.device()).free) / 4;
  const auto parts = static_cast<std::int64_t>(bytes / std::max(room, kLeast)) + 1;
  return std::min(parts, rows);
}

/// Classes in each of `parts`, which begin where aligned loads can.
std::int64_t classes_in_part(std::int64_t classes, std::int64_t parts) {
  constexpr std::int64_t kAligned = 64;
  const std::int64_t each = (classes + parts - 1) / parts;
  return parts == 1 ? classes : (each + kAligned - 1) / kAligned * kAligned;
}

at::Tensor column(const at::Tensor& vector) { return vector.unsqueeze(1); }

class LinearCrossEntropyNode final : public SavingNode, public CountedMean {
 public:
  explicit LinearCrossEntropyNode(const Options& options) : options_(options) {}

  /// At forward, below autograd.
  at::Tensor run(const at::Tensor& input, const at::Tensor& weight, const MaybeTensor& bias,
                 const at::Tensor& target, const MaybeTensor& class_weight) {
    const std::int64_t rows = input.size(0);
    const std::int64_t parts = parts_for(input, weight, options_);
    const std::int64_t each = (rows + parts - 1) / parts;
    const at::Tensor whole_weight = weight.to(type_of(input, weight));
    const MaybeTensor whole_bias = cast_bias(bias, whole_weight.scalar_type());
    const auto type = working_type(whole_weight, options_.in_float32);
    const at::Tensor losses = at::empty({rows}, input.options().dtype(type));
    const at::Tensor log_sums = at::empty({rows}, input.options().dtype(wide_type(whole_weight)));
    for (std::int64_t first = 0; first < rows; first += each) {
      const std::int64_t count = std::min(each, rows - first);
      const at::Tensor logits =
          logits_of(input.narrow(0, first, count), whole_weight, whole_bias, options_);
      const at::Tensor classes = target.narrow(0, first, count);
      auto [part, sums] =
          cross_entropy_rows(logits, classes, options_.ignore_index, options_.in_float32);
      if (is_given(class_weight) || options_.label_smoothing > 0.0) {
        part = at::cross_entropy_loss(logits.to(type), classes, class_weight, at::Reduction::None,
                                      options_.ignore_index, options_.label_smoothing);
      }
      losses.narrow(0, first, count).copy_(part);
      log_sums.narrow(0, first, count)
          .copy_(sums.defined() ? sums : at::logsumexp(logits.to(log_sums.scalar_type()), 1));
    }
    // No exponential of a row that is ignored is more than 0.
    log_sums.masked_fill_(target.eq(options_.ignore_index),
                          std::numeric_limits<double>::infinity());
    log_sums_ = Kept(log_sums);
    return reduced(losses, target, class_weight);
  }

  /// At forward.
  void keep(const at::Tensor& input, const at::Tensor& weight, const MaybeTensor& bias,
            const at::Tensor& target, const MaybeTensor& class_weight) {
    tell_producer_kept(input);
    input_ = Kept(input);
    weight_ = Kept(weight);
    bias_ = kept(bias);
    target_ = Kept(target);
    class_weight_ = kept(class_weight);
  }

  std::string name() const override { return "brim::linear_cross_entropy_backward"; }

  std::optional<double> mean_count() override {
    return options_.reduction == at::Reduction::Mean
               ? std::optional<double>(
                     labels_counted(target_.take(), class_weight_.take(), options_.ignore_index))
               : std::nullopt;
  }

 private:
  variable_list backward(const at::Tensor& grad) override {
    // Backward may be called inside of a region of autocast.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const at::Tensor input = input_.take();
    const at::Tensor weight = weight_.take();
    const MaybeTensor bias = maybe(bias_.take());
    const MaybeTensor class_weight = maybe(class_weight_.take());
    return at::GradMode::is_enabled() ? differentiable(grad, input, weight, bias, class_weight)
                                      : in_parts(grad, input, weight, bias, class_weight);
  }

  void release() override {
    for (Kept* const each :
         {&input_, &weight_, &bias_, &target_, &class_weight_, &total_, &log_sums_}) {
      each->release();
    }
  }

  [[nodiscard]] at::ScalarType type_of(const at::Tensor& input, const at::Tensor& weight) const {
    return options_.cast_weights ? input.scalar_type() : weight.scalar_type();
  }

  /// The mean is divided by the weights of the targets, or by their number.
  at::Tensor reduced(const at::Tensor& losses, const at::Tensor& target,
                     const MaybeTensor& class_weight) {
    if (options_.reduction == at::Reduction::None) {
      return losses;
    }
    if (!is_given(class_weight)) {
      auto [loss, total] = reduce_rows(losses, target, options_.reduction, options_.ignore_index);
      total_ = Kept(total);
      return loss;
    }
    const at::Tensor total = weights_of(target, *class_weight).sum();
    total_ = Kept(total);
    const at::Tensor sum = losses.sum();
    return options_.reduction == at::Reduction::Mean ? sum.div(total) : sum;
  }

  /// The weight of each row's class; 0 for rows that are ignored.
  [[nodiscard]] at::Tensor weights_of(const at::Tensor& target,
                                      const at::Tensor& class_weight) const {
    return class_weight.index_select(0, target.clamp_min(0))
        .masked_fill(target.eq(options_.ignore_index), 0);
  }

  /// Of each row's loss, in a wide type; 0 for rows that are ignored.
  at::Tensor row_grads(const at::Tensor& grad, const at::Tensor& target,
                       const at::Tensor& log_sums) {
    at::Tensor rows = grad.to(log_sums.scalar_type());
    if (options_.reduction == at::Reduction::Mean) {
      rows = rows.div(total_.take());
    }
    return rows.expand_as(log_sums).masked_fill(target.eq(options_.ignore_index), 0);
  }

  variable_list in_parts(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
                         const MaybeTensor& bias, const MaybeTensor& class_weight) {
    const at::Tensor target = target_.take();
    const at::Tensor log_sums = log_sums_.take();
    const at::Tensor rows = row_grads(grad, target, log_sums);
    const at::Tensor by_target =
        is_given(class_weight) ? rows.mul(weights_of(target, class_weight->to(rows.scalar_type())))
                               : rows;
    const at::ScalarType type = type_of(input, weight);
    const std::int64_t classes = weight.size(0);
    const std::int64_t each = classes_in_part(classes, parts_for(input, weight, options_));
    variable_list result(3);
    at::Tensor sum;  // of the input's gradient
    if (task_should_compute_output(1)) {
      result[1] = at::empty_like(weight, at::MemoryFormat::Contiguous);
    }
    if (task_should_compute_output(2)) {
      result[2] = at::empty_like(*bias);
    }
    for (std::int64_t first = 0; first < classes; first += each) {
      const std::int64_t count = std::min(each, classes - first);
      const at::Tensor part = weight.narrow(0, first, count).to(type);
      const MaybeTensor part_bias =
          is_given(bias) ? cast_bias(bias->narrow(0, first, count), type) : MaybeTensor();
      at::Tensor logits = logits_of(input, part, part_bias, options_);
      const at::Tensor slope = softcap_slope(logits);
      if (options_.label_smoothing <= 0.0) {
        cross_entropy_rows_backward(by_target, logits, target.sub(first), log_sums, {},
                                    at::Reduction::None, options_.ignore_index - first,
                                    log_sums.scalar_type() != logits.scalar_type(), logits);
      } else {
        logits =
            smoothed_grad(logits, first, classes, target, log_sums, rows, by_target, class_weight);
      }
      if (slope.defined()) {
        logits.mul_(slope);
      }
      if (options_.scale != 1.0) {
        logits.mul_(options_.scale);
      }
      if (task_should_compute_output(0)) {
        const at::Tensor product = logits.mm(part);
        if (count == classes) {
          result[0] = product;
        } else {
          sum = sum.defined() ? sum.add_(product) : product.to(log_sums.scalar_type());
        }
      }
      if (task_should_compute_output(1)) {
        result[1].narrow(0, first, count).copy_(logits.t().mm(input));
      }
      if (task_should_compute_output(2)) {
        result[2].narrow(0, first, count).copy_(logits.sum(0));
      }
    }
    if (sum.defined()) {
      result[0] = sum.to(type);
    }
    return result;
  }

  /// Of the logits by what they were before softcapping; undefined where that is nothing.
  [[nodiscard]] at::Tensor softcap_slope(const at::Tensor& logits) const {
    return options_.softcap == 0.0 ? at::Tensor()
                                   : logits.div(options_.softcap).square_().neg_().add_(1);
  }

  /// The gradient of a part of the logits, with a share of the loss for every class.
  [[nodiscard]] at::Tensor smoothed_grad(const at::Tensor& logits, std::int64_t first,
                                         std::int64_t classes, const at::Tensor& target,
                                         const at::Tensor& log_sums, const at::Tensor& rows,
                                         const at::Tensor& by_target,
                                         const MaybeTensor& class_weight) const {
    const auto wide = log_sums.scalar_type();
    const double share = options_.label_smoothing / static_cast<double>(classes);
    const at::Tensor own = by_target.mul(1 - options_.label_smoothing);
    const at::Tensor others = rows.mul(share);
    const at::Tensor all = is_given(class_weight)
                               ? own.add(others.mul(class_weight->to(wide).sum()))
                               : own.add(rows.mul(options_.label_smoothing));
    const at::Tensor grad = logits.to(wide).sub_(column(log_sums)).exp_().mul_(column(all));
    const std::int64_t count = logits.size(1);
    const at::Tensor place = target.sub(first);
    const at::Tensor is_here = place.ge(0).logical_and_(place.lt(count));
    grad.scatter_add_(1, column(place.clamp(0, count - 1)), column(own.neg().mul_(is_here)));
    if (is_given(class_weight)) {
      grad.addmm_(column(others), class_weight->to(wide).narrow(0, first, count).unsqueeze(0), 1,
                  -1);
    } else {
      grad.sub_(column(others));
    }
    return grad.to(logits.scalar_type());
  }

  variable_list differentiable(const at::Tensor& grad, const at::Tensor& input,
                               const at::Tensor& weight, const MaybeTensor& bias,
                               const MaybeTensor& class_weight) {
    variable_list inputs{input, weight};
    if (is_given(bias)) {
      inputs.push_back(*bias);
    }
    const at::Tensor target = target_.take();
    variable_list result = grads_by_rerun(
        [&](const variable_list& given) {
          return plain(given[0], given[1], is_given(bias) ? MaybeTensor(given[2]) : MaybeTensor(),
                       target, class_weight, options_);
        },
        inputs, grad,
        {task_should_compute_output(0), task_should_compute_output(1),
         task_should_compute_output(2)},
        AutocastState(input.device().type()));
    result.resize(3);
    return result;
  }

  Options options_;
  Kept input_;
  Kept weight_;
  Kept bias_;
  Kept target_;
  Kept class_weight_;
  Kept total_;
  Kept log_sums_;
};

/// Whether the node does it; the rest is left to torch's operators.
bool is_known_form(const at::Tensor& input, const at::Tensor& weight, const MaybeTensor& bias,
                   const at::Tensor& target, const MaybeTensor& class_weight) {
  const bool are_dense = is_known(input) && is_known(weight) && is_known(bias) &&
                         is_known(class_weight) && target.scalar_type() == at::kLong &&
                         !is_wrapped(input);
  return are_dense && input.dim() == 2 && weight.dim() == 2 && target.dim() == 1 &&
         target.sym_size(0) == input.sym_size(0) && input.sym_numel() > 0 &&
         weight.sym_numel() > 0 && (!is_given(bias) || bias->dim() == 1) &&
         !needs_grad(class_weight);
}

at::Tensor run(const at::Tensor& input, const at::Tensor& weight, const MaybeTensor& bias,
               const at::Tensor& target, const MaybeTensor& class_weight, std::int64_t reduction,
               std::int64_t ignore_index, double label_smoothing, double scale, double softcap,
               bool in_float32, bool cast_weights, std::int64_t chunk) {
  TORCH_CHECK_VALUE(chunk >= 0, "chunk must be a positive number of rows, got ", chunk);
  TORCH_CHECK_VALUE(softcap >= 0, "softcap must be positive, got ", softcap);
  const Options options{reduction, ignore_index, label_smoothing, scale,
                        softcap,   in_float32,   cast_weights,    chunk};
  if (!is_known_form(input, weight, bias, target, class_weight)) {
    return plain(input, weight, bias, target, class_weight, options);
  }
  auto node = make_node<LinearCrossEntropyNode>(options);
  const bool needed = needs_grad(input, weight, bias);
  if (needed) {
    node->set_next_edges(torch::autograd::collect_next_edges(input, weight, bias));
  }
  at::Tensor loss = below_autograd([&] {
    return node->run(input, weight, bias, target,
                     is_given(class_weight) ? class_weight : MaybeTensor());
  });
  if (needed) {
    node->keep(input, weight, bias, target, class_weight);
    add_to_graph<false>(loss, node);
  }
  return loss;
}

template <c10::DeviceType Device>
at::Tensor run_autocast(const at::Tensor& input, const at::Tensor& weight, const MaybeTensor& bias,
                        const at::Tensor& target, const MaybeTensor& class_weight,
                        std::int64_t reduction, std::int64_t ignore_index, double label_smoothing,
                        double scale, double softcap, bool /*in_float32*/, bool /*cast_weights*/,
                        std::int64_t chunk) {
  const Autocast autocast(Device);
  return Dispatched<run>::call(autocast.cast(autocast.low(), input), weight, bias,
                               autocast.cast(at::kFloat, target),
                               autocast.cast(at::kFloat, class_weight), reduction, ignore_index,
                               label_smoothing, scale, softcap, true, true, chunk);
}

const Dispatched<run> kLinearCrossEntropy(
    "linear_cross_entropy(Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor "
    "target, Tensor? weight, int reduction, int ignore_index, float label_smoothing, float "
    "scale, float softcap, bool in_float32, bool cast_weights, int chunk) -> Tensor",
    {},
    {{c10::DispatchKey::CompositeImplicitAutograd, run},
     {c10::DispatchKey::AutocastCPU, run_autocast<at::kCPU>},
     {c10::DispatchKey::AutocastCUDA, run_autocast<at::kCUDA>}});

}  // namespace

at::Tensor functional::linear_cross_entropy(const at::Tensor& input,
                                            const at::Tensor& linear_weight,
                                            const at::Tensor& target,
                                            const MaybeTensor& linear_bias,
                                            const LinearCrossEntropyOptions& options) {
  return kLinearCrossEntropy(input, linear_weight, linear_bias, target, options.weight,
                             reduction_named(options.reduction), options.ignore_index,
                             options.label_smoothing, options.scale, options.softcap,
                             options.in_float32, false, options.chunk);
}

}  // namespace brim::nn
