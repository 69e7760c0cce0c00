#include "nn/ops/gated_kernels.h"

#include <ATen/TensorUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <ranges>

#include "nn/autograd/autocast.h"
#include "nn/autograd/node.h"
#include "nn/autograd/operator.h"
#include "nn/ops/bits.h"

namespace brim::nn {
namespace {

// -- The operators, whose kernels see matrices with rows that have no gaps ------------------------

at::Tensor gated_rows_anywhere(const at::Tensor& gate, const at::Tensor& up,
                               std::string_view activation) {
  return elementwise(activation).value(gate).mul_(up);
}

void gated_rows_grads_anywhere(const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& up,
                               std::string_view activation, const MaybeTensor& grad_gate,
                               const MaybeTensor& grad_up) {
  const Elementwise& act = elementwise(activation);
  at::Tensor value;
  const at::Tensor of_gate = act.grad(grad.mul(up), gate, &value);
  if (is_given(grad_gate)) {
    grad_gate->copy_(of_gate);
  }
  if (is_given(grad_up)) {
    grad_up->copy_(value.mul_(grad));
  }
}

at::Tensor activate_anywhere(const at::Tensor& input, std::string_view activation, bool /*wide*/) {
  return elementwise(activation).value(input);  // under the autocast that makes it wide
}

at::Tensor activate_grads_anywhere(const at::Tensor& grad, const at::Tensor& input,
                                   std::string_view activation) {
  return elementwise(activation).grad(grad, input, nullptr);
}

// Shapes alone, as brim.estimate asks for them: a kernel allocates its result and nothing else.

at::Tensor gated_rows_meta(const at::Tensor& gate, const at::Tensor& /*up*/,
                           std::string_view /*activation*/) {
  return at::empty(gate.sizes(), gate.options());
}

void gated_rows_grads_meta(const at::Tensor& /*grad*/, const at::Tensor& /*gate*/,
                           const at::Tensor& /*up*/, std::string_view /*activation*/,
                           const MaybeTensor& /*grad_gate*/, const MaybeTensor& /*grad_up*/) {}

at::Tensor activate_meta(const at::Tensor& input, std::string_view /*activation*/, bool wide) {
  return at::empty_like(input, input.options().dtype(wide ? at::kFloat : input.scalar_type()));
}

at::Tensor activate_grads_meta(const at::Tensor& /*grad*/, const at::Tensor& input,
                               std::string_view /*activation*/) {
  return at::empty_like(input);
}

const Operator<gated_rows_anywhere> kGatedRows(
    "gated_rows(Tensor gate, Tensor up, str activation) -> Tensor", {.meta = gated_rows_meta});
const Operator<gated_rows_grads_anywhere> kGatedRowsGrads(
    "gated_rows_grads(Tensor grad, Tensor gate, Tensor up, str activation, Tensor(a!)? grad_gate, "
    "Tensor(b!)? grad_up) -> ()",
    {.meta = gated_rows_grads_meta});
const Operator<activate_anywhere> kActivate(
    "activate(Tensor input, str activation, bool wide) -> Tensor", {.meta = activate_meta});
const Operator<activate_grads_anywhere> kActivateGrads(
    "activate_grads(Tensor grad, Tensor input, str activation) -> Tensor",
    {.meta = activate_grads_meta});

// -- Tensors as rows -----------------------------------------------------------------------------

/// Elements that lie side by side in the last dimensions.
std::int64_t row_length(const at::Tensor& tensor) {
  std::int64_t length = 1;
  for (std::int64_t dim = tensor.dim() - 1; dim >= 0; --dim) {
    if (tensor.size(dim) != 1 && tensor.stride(dim) != length) {
      break;
    }
    length *= tensor.size(dim);
  }
  return length;
}

/// The tensor as a matrix with rows of `columns` elements, which lie side by side, if the rows are
/// equally far apart.
MaybeTensor as_rows(const at::Tensor& tensor, std::int64_t columns) {
  const c10::DimVector shape = {tensor.numel() / columns, columns};
  const auto strides = at::detail::computeStride(tensor.sizes(), tensor.strides(), shape);
  return strides ? MaybeTensor(tensor.as_strided(shape, {strides->front(), 1})) : MaybeTensor();
}

/// Tensors of one shape and type as matrices of one shape.
class Matrices {
 public:
  explicit Matrices(std::initializer_list<at::Tensor> tensors) {
    const at::Tensor& first = *tensors.begin();
    is_flat_ = first.is_non_overlapping_and_dense() &&
               std::ranges::all_of(tensors, [&](const at::Tensor& each) {
                 return each.strides() == first.strides();
               });
    const std::int64_t columns = std::ranges::min(tensors | std::views::transform(row_length));
    for (const at::Tensor& each : tensors) {
      const MaybeTensor matrix =
          is_flat_ ? each.as_strided({1, each.numel()}, {each.numel(), 1}) : as_rows(each, columns);
      suit_ = suit_ && is_given(matrix);
      matrices_.push_back(matrix.value_or(at::Tensor()));
    }
  }

  [[nodiscard]] bool suit() const { return suit_; }

  /// Whether all lie in memory in the same order, without gaps: one row.
  [[nodiscard]] bool are_flat() const { return is_flat_; }

  const at::Tensor& operator[](std::size_t i) const { return matrices_[i]; }

 private:
  bool is_flat_;
  bool suit_ = true;
  variable_list matrices_;
};

bool has_kernel(const Elementwise& activation, const at::Tensor& tensor) {
  return activation.fused != Elementwise::Fused::nothing && tensor.is_cuda() &&
         tensor.numel() > 0 && !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

bool has_kernel_alone(const Elementwise& activation, const at::Tensor& tensor) {
  return activation.fused == Elementwise::Fused::alone_too && has_kernel(activation, tensor) &&
         tensor.is_non_overlapping_and_dense();
}

/// `grad` laid out as the other tensors are.
at::Tensor laid_out(const at::Tensor& grad, const at::Tensor& like) {
  return like.is_non_overlapping_and_dense() ? with_strides(grad, like.strides())
                                             : grad.contiguous();
}

}  // namespace

at::ScalarType value_type(const Elementwise& activation, const at::Tensor& input) {
  const at::ScalarType type = input.scalar_type();
  const bool is_wide = activation.powers && (type == at::kHalf || type == at::kBFloat16) &&
                       input.is_cuda() && AutocastState(at::kCUDA).enabled;
  return is_wide ? at::kFloat : type;
}

std::optional<at::Tensor> fused_gated(const Elementwise& activation, const at::Tensor& gate,
                                      const at::Tensor& up) {
  if (!has_kernel(activation, gate) || is_recorded(gate, up) ||
      value_type(activation, gate) != up.scalar_type() || gate.scalar_type() != up.scalar_type() ||
      gate.sizes() != up.sizes()) {
    return {};
  }
  const Matrices matrices{gate, up};
  if (!matrices.suit()) {
    return {};
  }
  const at::Tensor output = kGatedRows(matrices[0], matrices[1], activation.name);
  return matrices.are_flat() ? output.as_strided(gate.sizes(), gate.strides())
                             : output.view(gate.sizes());
}

bool fused_gated_grads_into(const Elementwise& activation, const at::Tensor& grad,
                            const at::Tensor& gate, const at::Tensor& up,
                            const at::Tensor& grad_gate, const at::Tensor& grad_up) {
  if (!has_kernel(activation, gate) || gate.scalar_type() != up.scalar_type() ||
      gate.scalar_type() != grad.scalar_type()) {
    return false;
  }
  const bool both = grad_gate.defined() && grad_up.defined();
  const at::Tensor& one = grad_gate.defined() ? grad_gate : grad_up;
  const Matrices matrices{laid_out(grad, gate), gate, up, one, both ? grad_up : one};
  if (!matrices.suit()) {
    return false;
  }
  const MaybeTensor of_gate = grad_gate.defined() ? MaybeTensor(matrices[3]) : MaybeTensor();
  const MaybeTensor of_up = grad_up.defined() ? MaybeTensor(matrices[4]) : MaybeTensor();
  kGatedRowsGrads(matrices[0], matrices[1], matrices[2], activation.name, of_gate, of_up);
  return true;
}

std::optional<std::array<at::Tensor, 2>> fused_gated_grads(const Elementwise& activation,
                                                           const at::Tensor& grad,
                                                           const at::Tensor& gate,
                                                           const at::Tensor& up,
                                                           std::array<bool, 2> wanted) {
  if (!has_kernel(activation, gate)) {
    return {};
  }
  std::array<at::Tensor, 2> grads{wanted[0] ? at::empty_like(gate) : at::Tensor(),
                                  wanted[1] ? at::empty_like(up) : at::Tensor()};
  if (!fused_gated_grads_into(activation, grad, gate, up, grads[0], grads[1])) {
    return {};
  }
  return grads;
}

std::optional<at::Tensor> fused_activation(const Elementwise& activation, const at::Tensor& input) {
  if (!has_kernel_alone(activation, input) || is_recorded(input)) {
    return {};
  }
  return kActivate(input, activation.name, value_type(activation, input) != input.scalar_type());
}

std::optional<at::Tensor> fused_activation_grad(const Elementwise& activation,
                                                const at::Tensor& grad, const at::Tensor& input) {
  if (!has_kernel_alone(activation, input)) {
    return {};
  }
  return kActivateGrads(with_strides(grad, input.strides()), input, activation.name);
}

}  // namespace brim::nn
