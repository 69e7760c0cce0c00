#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <brim/nn/functional.h>

#include "nn/autograd/operator.h"
#include "nn/autograd/rerun.h"
#include "nn/ops/gated_kernels.h"

// Activations by name, and their products with a second tensor: the MLPs of most language models.
// torch keeps the gate, its activation and the other factor, and the next layer keeps the
// product. Here the two inputs are kept, and the product is computed again if that layer asks.

namespace brim::nn {
namespace {

using Grads = std::optional<variable_list>;

at::Tensor value_of(const Elementwise& activation, const at::Tensor& x) {
  if (auto fused = fused_activation(activation, x)) {
    return *std::move(fused);
  }
  return activation.value(x);
}

/// Only if the activation has `grad`. @param y as there
at::Tensor grad_of(const Elementwise& activation, const at::Tensor& grad, const at::Tensor& x,
                   at::Tensor* y) {
  if (auto fused = fused_activation_grad(activation, grad, x)) {
    if (y != nullptr) {
      *y = value_of(activation, x);
    }
    return *std::move(fused);
  }
  return activation.grad(grad, x, y);
}

/// `value`, which has no other user, times `other`.
at::Tensor times(const at::Tensor& value, const at::Tensor& other) {
  const bool in_place = !is_recorded(value, other) && value.scalar_type() == other.scalar_type();
  return in_place ? value.mul_(other) : value.mul(other);
}

/// act(gate) * up.
at::Tensor product(const Elementwise& activation, const at::Tensor& gate, const at::Tensor& up) {
  if (auto fused = fused_gated(activation, gate, up)) {
    return *std::move(fused);
  }
  return times(value_of(activation, gate), up);
}

/// Each gradient in the type of its tensor, as autograd would cast it.
std::array<at::Tensor, 2> product_grads(const Elementwise& activation, const at::Tensor& grad,
                                        const at::Tensor& gate, const at::Tensor& up,
                                        std::array<bool, 2> wanted) {
  if (auto fused = fused_gated_grads(activation, grad, gate, up, wanted)) {
    return *std::move(fused);
  }
  // That of gate is always wanted: it needs a gradient, or there is no node.
  at::Tensor value;
  const at::Tensor of_value = grad.mul(up).to(value_type(activation, gate));
  std::array<at::Tensor, 2> grads{
      grad_of(activation, of_value, gate, wanted[1] ? &value : nullptr)};
  if (wanted[1]) {
    grads[1] = times(value, grad).to(up.scalar_type());
  }
  return grads;
}

struct Activated {
  const Elementwise* activation;

  [[nodiscard]] std::string_view name() const { return activation->name; }

  [[nodiscard]] at::Tensor value(const variable_list& inputs) const {
    return value_of(*activation, inputs[0]);
  }

  [[nodiscard]] Grads grads(const at::Tensor& grad, const variable_list& inputs,
                            const std::vector<bool>& /*needed*/) const {
    if (activation->grad == nullptr) {
      return {};
    }
    return Grads({grad_of(*activation, grad, inputs[0], nullptr)});
  }
};

struct Gated {
  const Elementwise* activation;

  [[nodiscard]] static std::string_view name() { return "gated"; }

  [[nodiscard]] at::Tensor value(const variable_list& inputs) const {
    return product(*activation, inputs[0], inputs[1]);
  }

  [[nodiscard]] Grads grads(const at::Tensor& grad, const variable_list& inputs,
                            const std::vector<bool>& needed) const {
    if (activation->grad == nullptr) {
      return {};
    }
    const auto grads =
        product_grads(*activation, grad, inputs[0], inputs[1], {needed[0], needed[1]});
    return Grads({grads[0], grads[1]});
  }
};

/// gate and up are the halves of one tensor.
struct GatedPacked {
  const Elementwise* activation;
  bool gate_first;
  std::int64_t dim;

  [[nodiscard]] static std::string_view name() { return "gated_packed"; }

  struct Halves {
    at::Tensor gate;
    at::Tensor up;
  };

  [[nodiscard]] Halves halves_of(const at::Tensor& packed) const {
    const auto halves = packed.chunk(2, dim);
    return gate_first ? Halves{halves[0], halves[1]} : Halves{halves[1], halves[0]};
  }

  [[nodiscard]] at::Tensor value(const variable_list& inputs) const {
    const Halves halves = halves_of(inputs[0]);
    return product(*activation, halves.gate, halves.up);
  }

  [[nodiscard]] Grads grads(const at::Tensor& grad, const variable_list& inputs,
                            const std::vector<bool>& /*needed*/) const {
    if (activation->grad == nullptr) {
      return {};
    }
    const auto [gate, up] = halves_of(inputs[0]);
    if (gate.is_cuda()) {
      const at::Tensor result = at::empty_like(inputs[0]);
      const Halves grads = halves_of(result);
      if (fused_gated_grads_into(*activation, grad, gate, up, grads.gate, grads.up)) {
        return Grads({result});
      }
    }
    auto grads = product_grads(*activation, grad, gate, up, {true, true});
    if (!gate_first) {
      std::swap(grads[0], grads[1]);
    }
    return Grads({at::cat(grads, dim)});
  }
};

// -- Operators -----------------------------------------------------------------------------------

at::Tensor torch_activation(const at::Tensor& input, std::string_view name,
                            std::int64_t /*recompute*/) {
  return elementwise(name).value(input);
}

at::Tensor activation_autograd(const at::Tensor& input, std::string_view name,
                               std::int64_t recompute) {
  return run_and_keep_inputs(Activated{&elementwise(name)}, {input}, recompute);
}

at::Tensor torch_gated(const at::Tensor& gate, const at::Tensor& up, std::string_view activation,
                       std::int64_t /*recompute*/) {
  return at::mul(elementwise(activation).value(gate), up);
}

at::Tensor gated_autograd(const at::Tensor& gate, const at::Tensor& up, std::string_view activation,
                          std::int64_t recompute) {
  // If only `up` needs a gradient, torch keeps no more than we would. Broadcasting is torch's.
  if (!needs_grad(gate) || gate.sym_sizes() != up.sym_sizes()) {
    return torch_gated(gate, up, activation, recompute);
  }
  return run_and_keep_inputs(Gated{&elementwise(activation)}, {gate, up}, recompute);
}

void check_halves(const at::Tensor& packed, std::int64_t dim) {
  TORCH_CHECK_VALUE(packed.dim() > 0, "packed must have at least one dimension, got a number");
  TORCH_CHECK_INDEX(dim >= -packed.dim() && dim < packed.dim(), "dim must be from ", -packed.dim(),
                    " to ", packed.dim() - 1, ", got ", dim);
  TORCH_CHECK_VALUE(packed.sym_size(dim) % 2 == 0, "packed must have an even size in dimension ",
                    dim, ", got ", packed.sym_size(dim));
}

at::Tensor torch_gated_packed(const at::Tensor& packed, std::string_view activation,
                              bool gate_first, std::int64_t dim, std::int64_t /*recompute*/) {
  check_halves(packed, dim);
  const auto halves = packed.chunk(2, dim);
  return torch_gated(halves[gate_first ? 0 : 1], halves[gate_first ? 1 : 0], activation, false);
}

at::Tensor gated_packed_autograd(const at::Tensor& packed, std::string_view activation,
                                 bool gate_first, std::int64_t dim, std::int64_t recompute) {
  check_halves(packed, dim);
  return run_and_keep_inputs(GatedPacked{&elementwise(activation), gate_first, dim}, {packed},
                             recompute);
}

const LayerOperator<activation_autograd, torch_activation> kActivation(
    "activation(Tensor input, str name, int recompute=0) -> Tensor");
const LayerOperator<gated_autograd, torch_gated> kGated(
    "gated(Tensor gate, Tensor up, str activation, int recompute=0) -> Tensor");
const LayerOperator<gated_packed_autograd, torch_gated_packed> kGatedPacked(
    "gated_packed(Tensor packed, str activation, bool gate_first, int dim, int recompute=0) "
    "-> Tensor");

}  // namespace

at::Tensor functional::activation(const at::Tensor& input, std::string_view name, Again recompute) {
  return kActivation(input, name, recompute);
}

at::Tensor functional::gated(const at::Tensor& gate, const at::Tensor& up,
                             std::string_view activation, Again recompute) {
  return kGated(gate, up, activation, recompute);
}

at::Tensor functional::gated_packed(const at::Tensor& packed, std::string_view activation,
                                    bool gate_first, std::int64_t dim, Again recompute) {
  return kGatedPacked(packed, activation, gate_first, dim, recompute);
}

}  // namespace brim::nn
