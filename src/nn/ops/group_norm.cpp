#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/group_norm.h>
#include <ATen/ops/native_group_norm.h>
#include <ATen/ops/native_group_norm_backward.h>
#include <brim/nn/functional.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include <array>

#include "nn/autograd/float_autocast.h"
#include "nn/autograd/known.h"
#include "nn/autograd/node.h"
#include "nn/autograd/optional_tensor.h"
#include "nn/autograd/storage_pinning.h"
#include "nn/cpu/number.h"
#include "nn/ops/channels.h"

namespace brim::nn {
namespace {

/// The input as samples, channels and places.
struct Sizes {
  explicit Sizes(const at::Tensor& input)
      : samples(input.sym_size(0)), channels(input.sym_size(1)) {
    for (const c10::SymInt& size : input.sym_sizes().slice(2)) {
      places = places * size;
    }
  }

  c10::SymInt samples;
  c10::SymInt channels;
  c10::SymInt places = 1;
};

/// As torch's function and its derivative bring tensors to their kernels.
at::Tensor for_kernel(const at::Tensor& tensor, at::MemoryFormat format) {
  return tensor.contiguous(tensor.is_cpu() ? format : at::MemoryFormat::Contiguous);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> run(const at::Tensor& input, std::int64_t groups,
                                                   const MaybeTensor& weight,
                                                   const MaybeTensor& bias, double eps) {
  const Sizes sizes(input);
  return at::native_group_norm_symint(for_kernel(input, input.suggest_memory_format()), weight,
                                      bias, sizes.samples, sizes.channels, sizes.places, groups,
                                      eps);
}

class GroupNormNode final : public SavingNode {
 public:
  GroupNormNode(std::int64_t groups, double eps) : groups_(groups), eps_(eps) {}

  void keep(const at::Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias,
            const at::Tensor& mean, const at::Tensor& rstd) {
    tell_producer_kept(input);
    keeps_input_ = true;
    input_ = Kept(input);
    weight_ = kept(weight);
    bias_ = kept(bias);
    mean_ = Kept(mean);
    rstd_ = Kept(rstd);
  }

  void keep_type(at::ScalarType bias_type) { bias_type_ = bias_type; }

  std::optional<int> layers_to_recompute() const override {
    return keeps_input_ ? std::optional(1) : std::nullopt;
  }

  bool prepare_to_recompute() override {
    const std::lock_guard lock(mutex_);
    // The copies are no larger than what the layer behind does not keep.
    const c10::SymInt most = elements() / 2;
    return weight_.freeze(most) && bias_.freeze(most);
  }

  at::Tensor recompute() override {
    const std::lock_guard lock(mutex_);
    return std::get<0>(
        run(input_.lend(), groups_, maybe(weight_.lend()), maybe(bias_.lend()), eps_));
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard lock(mutex_);
    variable_list result(3);
    const at::Tensor& grad = grads[0];
    if (!grad.defined()) {
      return result;
    }
    if (!keeps_input_) {
      result[2] = sum_over_channels(grad, bias_type_);
      return result;
    }
    const std::array<bool, 3> mask{task_should_compute_output(0), task_should_compute_output(1),
                                   task_should_compute_output(2)};
    const at::Tensor input = input_.take();
    const at::Tensor weight = weight_.take();
    if (at::GradMode::is_enabled()) {
      differentiable(grad, input, weight, mask, result);
      return result;
    }
    const Sizes sizes(input);
    // torch's kernel for channels last writes to the input's gradient even where none is asked for.
    const at::MemoryFormat format =
        mask[0] ? input.suggest_memory_format() : at::MemoryFormat::Contiguous;
    std::tie(result[0], result[1], result[2]) = at::native_group_norm_backward_symint(
        for_kernel(grad, format), for_kernel(input, format), mean_.take(), rstd_.take(),
        maybe(weight), sizes.samples, sizes.channels, sizes.places, groups_, mask);
    return result;
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    for (Kept* const each : {&input_, &weight_, &bias_, &mean_, &rstd_}) {
      each->release();
    }
  }

  std::string name() const override { return "brim::group_norm_backward"; }

 private:
  /// torch's kernel has no derivative, so the statistics are worked out again, as a function of the
  /// input.
  void differentiable(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
                      const std::array<bool, 3>& mask, variable_list& result) const {
    const Sizes sizes(input);
    const at::ScalarType wide = at::toOpMathType(input.scalar_type());
    const c10::SymInt in_group = sizes.channels / groups_ * sizes.places;
    const c10::SymDimVector by_group{sizes.samples, groups_, in_group};
    const c10::SymDimVector by_channel{sizes.samples, sizes.channels, sizes.places};
    const at::Tensor grouped = input.to(wide).reshape_symint(by_group);
    const at::Tensor centred = grouped.sub(grouped.mean(-1, true));
    const at::Tensor rstd = centred.square().mean(-1, true).add(eps_).rsqrt();
    const at::Tensor normal = centred.mul(rstd);
    const at::Tensor up = grad.to(wide).reshape_symint(by_channel);
    if (mask[0]) {
      at::Tensor scaled = up;
      if (weight.defined()) {
        scaled = up.mul(weight.to(wide).view_symint({1, sizes.channels, 1}));
      }
      scaled = scaled.reshape_symint(by_group);
      const at::Tensor inner =
          scaled.sub(scaled.mean(-1, true)).sub(normal.mul(scaled.mul(normal).mean(-1, true)));
      result[0] = inner.mul(rstd).reshape_symint(input.sym_sizes()).to(input.scalar_type());
    }
    if (mask[1]) {
      result[1] = up.mul(normal.reshape_symint(by_channel))
                      .sum(at::IntArrayRef({0, 2}))
                      .to(weight.scalar_type());
    }
    if (mask[2]) {
      result[2] = up.sum(at::IntArrayRef({0, 2})).to(bias_type_);
    }
  }

  std::int64_t groups_;
  bool keeps_input_ = false;
  at::ScalarType bias_type_ = at::kFloat;
  double eps_;
  Kept input_;
  Kept weight_;
  Kept bias_;
  Kept mean_;
  Kept rstd_;
};

void check(const at::Tensor& input, std::int64_t groups, const MaybeTensor& weight,
           const MaybeTensor& bias) {
  TORCH_CHECK(input.dim() >= 2, "Expected at least 2 dimensions for input tensor but received ",
              input.dim());
  TORCH_CHECK_VALUE(groups > 0, "num_groups must be 1 or more, got ", groups);
  // torch's Python function says this of its groups, its operator does not.
  const Sizes sizes(input);
  TORCH_CHECK_VALUE(sizes.samples * sizes.channels / groups * sizes.places != 1,
                    "Expected more than 1 value per channel when training, got input size ",
                    input.sym_sizes());
  TORCH_CHECK(sizes.channels % groups == 0,
              "Expected number of channels in input to be divisible by num_groups, but got input "
              "of shape ",
              input.sym_sizes(), " and num_groups=", groups);
  for (const MaybeTensor* const each : {&weight, &bias}) {
    TORCH_CHECK(!is_given(*each) || ((*each)->dim() == 1 && (*each)->sym_size(0) == sizes.channels),
                "Expected ", each == &weight ? "weight" : "bias",
                " to be a vector of size equal to the number of channels in input, but got shape ",
                (*each)->sym_sizes(), " and input of shape ", input.sym_sizes());
  }
}

at::Tensor group_norm_anywhere(const at::Tensor& input, std::int64_t groups,
                               const MaybeTensor& weight, const MaybeTensor& bias, double eps) {
  check(input, groups, weight, bias);
  return std::get<0>(run(input, groups, weight, bias, eps));
}

/// torch's own, which keeps what it will.
at::Tensor torch_group_norm(const at::Tensor& input, std::int64_t groups, const MaybeTensor& weight,
                            const MaybeTensor& bias, double eps) {
  return at::group_norm(input, groups, weight, bias, eps);
}

at::Tensor group_norm_autograd(const at::Tensor& input, std::int64_t groups,
                               const MaybeTensor& weight, const MaybeTensor& bias, double eps) {
  check(input, groups, weight, bias);
  if ((input.requires_grad() || trains(weight)) && pins_more_than_itself(input)) {
    const at::Tensor copy = for_kernel(input, input.suggest_memory_format());
    if (!copy.is_same(input)) {  // torch makes the copy too, and keeps it
      return group_norm_autograd(copy, groups, weight, bias, eps);
    }
  }
  PtrTo<GroupNormNode> node;
  if (needs_grad(input, weight, bias)) {
    node = make_node<GroupNormNode>(groups, eps);
    node->set_next_edges(torch::autograd::collect_next_edges(input, weight, bias));
  }
  auto [output, mean, rstd] = [&] {
    const BelowAutograd below;
    return run(input, groups, weight, bias, eps);
  }();
  if (!node) {
    return std::move(output);
  }
  if (input.requires_grad() || trains(weight)) {
    node->keep(input, weight, bias, mean, rstd);
  }
  if (is_given(bias)) {
    node->keep_type(bias->scalar_type());
  }
  torch::autograd::set_history(output, node);
  node->set_output(output);
  return std::move(output);
}

using GroupNormOp = at::Tensor(const at::Tensor&, std::int64_t, const MaybeTensor&,
                               const MaybeTensor&, double);

at::Tensor call(const at::Tensor& input, std::int64_t groups, const MaybeTensor& weight,
                const MaybeTensor& bias, double eps) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("brim::group_norm", "").typed<GroupNormOp>();
  return op.call(input, groups, weight, bias, eps);
}

template <c10::DeviceType Backend>
at::Tensor group_norm_autocast(const at::Tensor& input, std::int64_t groups,
                               const MaybeTensor& weight, const MaybeTensor& bias, double eps) {
  const Autocast autocast(Backend);
  return call(autocast.cast(at::kFloat, input), groups, autocast.cast(at::kFloat, weight),
              autocast.cast(at::kFloat, bias), eps);
}

}  // namespace

namespace functional {

at::Tensor group_norm(const at::Tensor& input, std::int64_t num_groups, const MaybeTensor& weight,
                      const MaybeTensor& bias, double eps) {
  return call(input, num_groups, weight, bias, eps);
}

}  // namespace functional

TORCH_LIBRARY_FRAGMENT(brim, m) {
  m.def(
      "group_norm(Tensor input, int num_groups, Tensor? weight, Tensor? bias, float eps) -> "
      "Tensor");
}

TORCH_LIBRARY_IMPL(brim, CompositeExplicitAutograd, m) {
  m.impl("group_norm", kOrTorchs<group_norm_anywhere, torch_group_norm>);
}

// Under vmap as torch does it: torch knows how to batch its own operators.
TORCH_LIBRARY_IMPL(brim, FuncTorchBatched, m) { m.impl("group_norm", torch_group_norm); }

TORCH_LIBRARY_IMPL(brim, Autograd, m) {
  m.impl("group_norm", kOrTorchs<group_norm_autograd, torch_group_norm>);
}

BRIM_AUTOCAST_AS_TORCH(group_norm)

}  // namespace brim::nn
