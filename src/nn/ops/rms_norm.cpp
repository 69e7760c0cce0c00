#include "nn/ops/rms_norm.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_fused_rms_norm.h>
#include <ATen/ops/_fused_rms_norm_backward.h>
#include <ATen/ops/rms_norm.h>
#include <brim/nn/functional.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include <array>
#include <limits>

#include "nn/autograd/float_autocast.h"
#include "nn/autograd/known.h"
#include "nn/autograd/node.h"
#include "nn/autograd/storage_pinning.h"
#include "nn/cpu/number.h"
#include "nn/ops/bits.h"

namespace brim::nn {
namespace {

bool is_channels_last(const at::Tensor& input) {
  const at::MemoryFormat format = input.suggest_memory_format();
  return format == at::MemoryFormat::ChannelsLast || format == at::MemoryFormat::ChannelsLast3d;
}

/// Whether torch's own function takes the kernel of this device: as it decides itself.
bool has_kernel(const at::Tensor& input, const MaybeTensor& weight) {
  return input.is_cuda() && !is_channels_last(input) &&
         (!is_given(weight) || weight->scalar_type() == input.scalar_type());
}

double eps_of(const at::Tensor& input, std::optional<double> eps) {
  if (input.scalar_type() == at::kDouble) {
    return eps.value_or(std::numeric_limits<double>::epsilon());
  }
  return static_cast<float>(eps.value_or(std::numeric_limits<float>::epsilon()));
}

at::Tensor rstd_of(const at::Tensor& wide_input, std::int64_t dims, double eps) {
  return wide_input.pow(2).mean(last_dims(dims), true).add(eps).rsqrt();
}

/// The value, and one number a row.
std::tuple<at::Tensor, at::Tensor> run(const at::Tensor& input, at::IntArrayRef shape,
                                       const MaybeTensor& weight, std::optional<double> eps) {
  if (has_kernel(input, weight) || input.is_cpu()) {
    // On the CPU a composition of ATen operators, the same for all mixes of types.
    return at::_fused_rms_norm(input, shape, weight, eps);
  }
  const at::Tensor wide = input.to(at::toOpMathType(input.scalar_type()));
  at::Tensor rstd = rstd_of(wide, static_cast<std::int64_t>(shape.size()), eps_of(input, eps));
  at::Tensor value = wide.mul(rstd);
  if (is_given(weight)) {
    value = value.mul(*weight);
  }
  if (!is_channels_last(input)) {
    value = value.contiguous();
  }
  return {value.to(input.scalar_type()), std::move(rstd)};
}

class RmsNormNode final : public SavingNode {
 public:
  RmsNormNode(at::IntArrayRef shape, std::optional<double> eps)
      : shape_(shape.begin(), shape.end()), eps_(eps) {}

  void keep(const at::Tensor& input, const MaybeTensor& weight, const at::Tensor& rstd) {
    tell_producer_kept(input);
    input_ = Kept(input);
    weight_ = kept(weight);
    // For the weight's gradient alone torch keeps as many numbers as the input has, and none more.
    keeps_rstd_ = input.requires_grad() || has_kernel(input, weight);
    if (keeps_rstd_) {
      rstd_ = Kept(rstd);
    }
  }

  std::optional<int> layers_to_recompute() const override { return 1; }

  bool prepare_to_recompute() override {
    const std::lock_guard lock(mutex_);
    return weight_.freeze(elements());  // no larger than what the layer behind does not keep
  }

  at::Tensor recompute() override {
    const std::lock_guard lock(mutex_);
    return std::get<0>(run(input_.lend(), shape_, maybe(weight_.lend()), eps_));
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard lock(mutex_);
    variable_list result(2);
    const at::Tensor& grad = grads[0];
    if (!grad.defined()) {
      return result;
    }
    const std::array<bool, 2> mask{task_should_compute_output(0), task_should_compute_output(1)};
    const auto dims = static_cast<std::int64_t>(shape_.size());
    const at::Tensor input = input_.take();
    const MaybeTensor weight = maybe(weight_.take());
    // In double backward the number of a row is a function of the input too.
    const at::Tensor rstd =
        keeps_rstd_ && !at::GradMode::is_enabled()
            ? rstd_.take()
            : rstd_of(input.to(at::toOpMathType(input.scalar_type())), dims, eps_of(input, eps_));
    if (at::GradMode::is_enabled()) {
      std::tie(result[0], result[1]) =
          rms_norm_backward_anywhere(grad, input, rstd, weight, dims, mask[0], mask[1]);
    } else if (has_kernel(input, weight)) {
      std::tie(result[0], result[1]) =
          at::_fused_rms_norm_backward(grad, input, shape_, rstd, weight, mask);
    } else {
      std::tie(result[0], result[1]) =
          rms_norm_backward(grad, input, rstd, weight, dims, mask[0], mask[1]);
      if (mask[0]) {
        // Of torch's products the gradient's comes first.
        result[0] = as_elementwise(result[0], grad.sym_strides(), result[0].sym_strides());
      }
    }
    return result;
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    input_.release();
    weight_.release();
    rstd_.release();
  }

  std::string name() const override { return "brim::rms_norm_backward"; }

 private:
  c10::DimVector shape_;
  std::optional<double> eps_;
  bool keeps_rstd_ = false;
  Kept input_;
  Kept weight_;
  Kept rstd_;
};

void check(const at::Tensor& input, at::IntArrayRef shape, const MaybeTensor& weight) {
  TORCH_CHECK(!shape.empty(), "Expected normalized_shape to be at least 1-dimensional, but got ",
              shape);
  const auto wanted = c10::fromIntArrayRefSlow(shape);
  TORCH_CHECK(!is_given(weight) || weight->sym_sizes().equals(wanted),
              "Expected weight to be of same shape as normalized_shape, but got weight of shape ",
              weight->sym_sizes(), " and normalized_shape = ", shape);
  const auto sizes = input.sym_sizes();
  TORCH_CHECK(
      sizes.size() >= shape.size() && sizes.slice(sizes.size() - shape.size()).equals(wanted),
      "Given normalized_shape=", shape, ", expected input with shape [*, ", shape,
      "], but got input of size ", sizes);
}

at::Tensor rms_norm_anywhere(const at::Tensor& input, at::IntArrayRef shape,
                             const MaybeTensor& weight, std::optional<double> eps) {
  return at::rms_norm(input, shape, is_given(weight) ? weight : MaybeTensor(), eps);
}

at::Tensor rms_norm_autograd(const at::Tensor& input, at::IntArrayRef shape,
                             const MaybeTensor& weight, std::optional<double> eps) {
  check(input, shape, weight);
  if (trains(weight) && !input.requires_grad() && pins_more_than_itself(input)) {
    // torch keeps a product of its own
    return rms_norm_autograd(input.clone(at::MemoryFormat::Contiguous), shape, weight, eps);
  }
  PtrTo<RmsNormNode> node;
  if (needs_grad(input, weight)) {
    node = make_node<RmsNormNode>(shape, eps);
    node->set_next_edges(torch::autograd::collect_next_edges(input, weight));
  }
  auto [output, rstd] = [&] {
    const BelowAutograd below;
    return run(input, shape, is_given(weight) ? weight : MaybeTensor(), eps);
  }();
  if (node) {
    node->keep(input, weight, rstd);
    torch::autograd::set_history(output, node);
    node->set_output(output);
  }
  return std::move(output);
}

using RmsNormOp = at::Tensor(const at::Tensor&, at::IntArrayRef, const MaybeTensor&,
                             std::optional<double>);

at::Tensor call(const at::Tensor& input, at::IntArrayRef shape, const MaybeTensor& weight,
                std::optional<double> eps) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("brim::rms_norm", "").typed<RmsNormOp>();
  return op.call(input, shape, weight, eps);
}

template <c10::DeviceType Backend>
at::Tensor rms_norm_autocast(const at::Tensor& input, at::IntArrayRef shape,
                             const MaybeTensor& weight, std::optional<double> eps) {
  const Autocast autocast(Backend);
  return call(autocast.cast(at::kFloat, input), shape, autocast.cast(at::kFloat, weight), eps);
}

}  // namespace

namespace functional {

at::Tensor rms_norm(const at::Tensor& input, at::IntArrayRef normalized_shape,
                    const MaybeTensor& weight, std::optional<double> eps) {
  return call(input, normalized_shape, weight, eps);
}

}  // namespace functional

TORCH_LIBRARY_FRAGMENT(brim, m) {
  m.def("rms_norm(Tensor input, int[] normalized_shape, Tensor? weight, float? eps) -> Tensor");
}

TORCH_LIBRARY_IMPL(brim, CompositeExplicitAutograd, m) { m.impl("rms_norm", rms_norm_anywhere); }

// Under vmap as torch does it: torch knows how to batch its own operators.
TORCH_LIBRARY_IMPL(brim, FuncTorchBatched, m) { m.impl("rms_norm", rms_norm_anywhere); }

TORCH_LIBRARY_IMPL(brim, Autograd, m) {
  m.impl("rms_norm", kOrTorchs<rms_norm_autograd, rms_norm_anywhere>);
}

BRIM_AUTOCAST_AS_TORCH(rms_norm)

}  // namespace brim::nn
