#include <ATen/TensorUtils.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <brim/nn/functional.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>

#include <numeric>

#include "nn/autograd/cast_weight.h"
#include "nn/autograd/node.h"
#include "nn/autograd/operand.h"
#include "nn/autograd/operator.h"
#include "nn/autograd/optional_tensor.h"
#include "nn/autograd/product_again.h"
#include "nn/autograd/runs_again.h"
#include "nn/autograd/storage_pinning.h"

namespace brim::nn {
namespace {

/// The sizes with all dimensions but the last as one, as torch has them for the matrix product.
c10::SymDimVector folded_sizes(const at::Tensor& tensor) {
  const auto sizes = tensor.sym_sizes();
  c10::SymInt rows = 1;
  for (const auto& size : sizes.slice(0, sizes.size() - 1)) {
    rows = rows * size;
  }
  return {rows, sizes.back()};
}

at::Tensor matrix_of(const at::Tensor& tensor) {
  return tensor.dim() == 2 ? tensor : tensor.reshape_symint(folded_sizes(tensor));
}

/// Whether that takes no copy.
bool folds(const at::Tensor& tensor) {
  return at::detail::computeStride(tensor.sym_sizes(), tensor.sym_strides(), folded_sizes(tensor))
      .has_value();
}

bool is_column_major(const at::Tensor& matrix) {
  return matrix.sym_stride(0) == 1 && matrix.sym_stride(1) == matrix.sym_size(0);
}

bool is_row_major(const at::Tensor& matrix) {
  return matrix.sym_stride(1) == 1 && matrix.sym_stride(0) == matrix.sym_size(1);
}

/// What a layer has: a matrix and a row. The rest that torch's function takes is left to it.
bool is_plain(const at::Tensor& input, const at::Tensor& weight, const MaybeTensor& bias) {
  return input.dim() >= 1 && weight.dim() == 2 &&
         (!is_given(bias) ||
          (bias->dim() == 1 && bias->is_contiguous() && bias->sym_size(0) == weight.sym_size(0)));
}

// Every product has the form that torch's own derivatives give it: another one is as right, but
// rounds differently.
class LinearNode final : public SavingNode, public RunsAgain {
 public:
  explicit LinearNode(const at::Tensor& input) : input_(input) {}

  /// At forward, below autograd: the output.
  /// @param kept the input, or a copy without gaps
  at::Tensor run(const at::Tensor& input, const at::Tensor& kept, const at::Tensor& weight,
                 const MaybeTensor& bias, bool weight_needs_grad) {
    const auto sizes = input.sym_sizes();
    sizes_ = c10::SymDimVector(sizes.begin(), sizes.end());
    type_ = input.scalar_type();
    row_major_weight_ = is_row_major(weight);
    // The bias is added inside the product, or where the input has gaps after it.
    fused_ = is_given(bias) && (input.dim() == 2 || input.is_contiguous_or_false());
    batched_ = !fused_ && input.dim() > 2 && !weight_needs_grad && !folds(input);
    if (batched_) {
      const at::Tensor output = at::matmul(input, weight.t());
      return is_given(bias) ? output.add_(*bias) : output;
    }
    const at::Tensor matrix = matrix_of(kept);
    column_major_input_ = is_column_major(matrix);
    return product(matrix, weight, bias);
  }

  void keep_input(const at::Tensor& input, bool recompute) { input_.keep(input, recompute); }
  void keep_weight(const at::Tensor& weight) { weight_ = Kept(weight); }

  /// At forward, after the others: what recompute() needs besides the weight.
  void allow_to_run_again(const at::Tensor& input, const MaybeTensor& bias, bool is_offered) {
    again_.allow(input, bias, is_offered, input_);
  }

  [[nodiscard]] bool is_batched() const { return batched_; }

  bool prepare_to_run_again() override {
    const std::lock_guard lock(mutex_);
    return again_.prepare(input_, weight_, elements(), /*is_alone=*/true);
  }

  bool offers_product() const override { return again_.is_offered(); }

  std::optional<int> layers_to_recompute() const override {
    return again_.is_offered() ? input_.layers() : std::nullopt;
  }

  bool prepare_to_recompute() override {
    const std::lock_guard lock(mutex_);
    return again_.prepare(input_, weight_, elements());
  }

  at::Tensor recompute() override {
    const std::lock_guard lock(mutex_);
    return again_.recompute([this](const MaybeTensor& bias) {
      return product(matrix_of(input_.lend()), in_type(weight_.lend(), type_), bias);
    });
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard lock(mutex_);
    variable_list result = grads_of(grads[0]);
    input_.forget();
    again_.forget();
    return result;
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    input_.release();
    weight_.release();
    again_.release();
  }

  std::string name() const override { return "brim::linear_backward"; }

 private:
  variable_list grads_of(const at::Tensor& given) {
    variable_list result(3);
    if (!given.defined()) {
      return result;
    }
    if (task_should_compute_output(2) && !fused_) {
      result[2] = bias_grad(given);
    }
    if (batched_) {
      if (task_should_compute_output(0)) {
        result[0] = input_grad_batched(given);
      }
      return result;
    }
    const at::Tensor grad = matrix_of(given);  // may be a copy
    if (task_should_compute_output(0)) {
      result[0] = input_grad(grad);
    }
    if (task_should_compute_output(1)) {
      const at::Tensor input = matrix_of(input_.take());
      result[1] = row_major_weight_ ? grad.t().mm(input) : input.t().mm(grad).t();
    }
    if (task_should_compute_output(2) && fused_) {
      result[2] = grad.sum(0);
    }
    return result;
  }

  [[nodiscard]] at::Tensor product(const at::Tensor& matrix, const at::Tensor& weight,
                                   const MaybeTensor& bias) const {
    const at::Tensor output =
        with_last(fused_ ? at::addmm(*bias, matrix, weight.t()) : at::mm(matrix, weight.t()),
                  weight.sym_size(0));
    return is_given(bias) && !fused_ ? output.add_(*bias) : output;
  }

  at::Tensor with_last(at::Tensor matrix, const c10::SymInt& last) const {
    if (sizes_.size() == 2) {
      return matrix;
    }
    c10::SymDimVector sizes = sizes_;
    sizes.back() = last;
    return matrix.reshape_symint(sizes);
  }

  at::Tensor input_grad(const at::Tensor& grad) {
    const at::Tensor weight = in_type(weight_.take(), type_);
    return with_last(column_major_input_ ? weight.t().mm(grad.t()).t() : grad.mm(weight),
                     sizes_.back());
  }

  /// torch multiplies an input that cannot be folded by the frozen weight batch by batch.
  at::Tensor input_grad_batched(const at::Tensor& grad) {
    const at::Tensor weight = in_type(weight_.take(), type_);
    c10::SymInt batches = 1;
    for (const auto& size : c10::SymIntArrayRef(sizes_).slice(0, sizes_.size() - 2)) {
      batches = batches * size;
    }
    const at::Tensor flat =
        grad.reshape_symint({batches, grad.sym_size(grad.dim() - 2), weight.sym_size(0)});
    return flat
        .bmm(weight.unsqueeze(0).expand_symint({batches, weight.sym_size(0), weight.sym_size(1)}))
        .reshape_symint(sizes_);
  }

  /// Of a bias that was added after the product.
  [[nodiscard]] static at::Tensor bias_grad(const at::Tensor& grad) {
    if (grad.dim() == 1) {
      return grad;
    }
    c10::DimVector leading(static_cast<std::size_t>(grad.dim() - 1));
    std::iota(leading.begin(), leading.end(), 0);
    return grad.sum(leading);
  }

  Operand input_;
  Kept weight_;
  ProductAgain again_;
  c10::SymDimVector sizes_;
  at::ScalarType type_ = at::kFloat;
  bool row_major_weight_ = true;
  bool column_major_input_ = false;
  bool fused_ = false;
  bool batched_ = false;
};

at::Tensor torch_linear(const at::Tensor& input, const at::Tensor& weight, const MaybeTensor& bias,
                        const MaybeTensor& /*parameter*/, bool /*recompute*/, bool /*runs_again*/) {
  return at::linear(input, weight, bias);
}

at::Tensor linear_autograd(const at::Tensor& input, const at::Tensor& weight,
                           const MaybeTensor& bias, const MaybeTensor& parameter, bool recompute,
                           bool runs_again) {
  if (!needs_grad(input, weight, bias)) {
    const BelowAutograd below;
    return at::linear(input, weight, bias);
  }
  if (!is_plain(input, weight, bias)) {
    return at::linear(input, weight, bias);
  }
  // torch copies such an input for the product, and keeps the copy.
  const bool copies =
      weight.requires_grad() && input.dim() > 2 && pins_more_than_itself(input) && !folds(input);
  const at::Tensor kept = copies ? input.contiguous() : input;
  auto node = make_node<LinearNode>(kept);
  node->set_next_edges(torch::autograd::collect_next_edges(kept, weight, bias));
  const at::Tensor output = [&] {
    const BelowAutograd below;
    return node->run(input, kept, weight, bias, weight.requires_grad());
  }();
  if (weight.requires_grad()) {
    node->keep_input(kept, recompute);
  }
  const bool is_offered = runs_again && !node->is_batched() && widens(kept, output) &&
                          (input.requires_grad() || stays(weight, parameter));
  if (input.requires_grad() || is_offered) {
    node->keep_weight(weight_to_keep(input, weight, parameter, recompute));
  }
  // For a loss alone, a copy that autocast made of the bias would be too much.
  const bool keeps_copy = is_given(bias) && (parameter.has_value() || !bias->is_leaf());
  if (is_offered || (recompute && input.requires_grad() && !node->is_batched() && !keeps_copy)) {
    node->allow_to_run_again(kept, bias, is_offered);
  }
  torch::autograd::set_history(output, node);
  node->set_output(output);
  return output;
}

const LayerOperator<linear_autograd, torch_linear, CastTo::low> kLinear(
    "linear(Tensor input, Tensor weight, Tensor? bias, Tensor? parameter, bool recompute, bool "
    "runs_again=False) -> Tensor",
    {kInGraphs});

}  // namespace

namespace functional {

at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const MaybeTensor& bias,
                  bool recompute, bool runs_again) {
  return kLinear(input, weight, bias, {}, recompute, runs_again);
}

}  // namespace functional
}  // namespace brim::nn
