#include <ATen/TensorUtils.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <brim/nn/functional.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/version.h>

#include <numeric>

#include "nn/autograd/operator.h"
#include "nn/autograd/product_layer_node.h"
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

/// Whether torch's matmul takes it as one matrix. Up to torch 2.13 the strides of dimensions of one
/// count, too.
bool is_one_matrix(const at::Tensor& tensor) {
#if TORCH_VERSION_MINOR >= 14
  return folds(tensor);
#else
  for (std::int64_t i = 0; i + 2 < tensor.dim(); ++i) {
    if (TORCH_GUARD_OR_TRUE(
            tensor.sym_stride(i).sym_ne(tensor.sym_stride(i + 1) * tensor.sym_size(i + 1)))) {
      return false;
    }
  }
  return true;
#endif
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
class LinearNode final : public ProductLayerNode {
 public:
  explicit LinearNode(const at::Tensor& input) : ProductLayerNode(input, /*holds_output=*/false) {}

  /// At forward, below autograd: the output.
  /// @param kept the input, or a copy without gaps
  at::Tensor run(const at::Tensor& input, const at::Tensor& kept, const at::Tensor& weight,
                 const MaybeTensor& bias, bool weight_needs_grad) {
    const auto sizes = input.sym_sizes();
    sizes_ = c10::SymDimVector(sizes.begin(), sizes.end());
    row_major_weight_ = is_row_major(weight);
    // The bias is added inside the product, or where the input has gaps after it.
    fused_ = is_given(bias) && (input.dim() == 2 || input.is_contiguous_or_false());
    batched_ = !fused_ && input.dim() > 2 && !weight_needs_grad && !is_one_matrix(input);
    if (batched_) {
      const at::Tensor output = at::matmul(input, weight.t());
      return is_given(bias) ? output.add_(*bias) : output;
    }
    const at::Tensor matrix = matrix_of(kept);
    column_major_input_ = is_column_major(matrix);
    return product(matrix, weight, bias);
  }

  using ProductLayerNode::allow_to_run_again;

  [[nodiscard]] bool is_batched() const { return batched_; }

  bool prepare_for_loss(bool copies) override {
    const std::lock_guard lock(mutex_);
    return prepare(copies, /*for_loss=*/true);
  }

  std::string name() const override { return "brim::linear_backward"; }

 private:
  at::Tensor run_again(const at::Tensor& input, const at::Tensor& weight,
                       const MaybeTensor& bias) const override {
    return product(matrix_of(input), weight, bias);
  }

  variable_list backward(const at::Tensor& given) override {
    variable_list result(3);
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
    const at::Tensor weight = take_weight();
    return with_last(column_major_input_ ? weight.t().mm(grad.t()).t() : grad.mm(weight),
                     sizes_.back());
  }

  /// torch multiplies an input that is not one matrix by the frozen weight batch by batch.
  at::Tensor input_grad_batched(const at::Tensor& grad) {
    const at::Tensor weight = take_weight();
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

  c10::SymDimVector sizes_;
  bool row_major_weight_ = true;
  bool column_major_input_ = false;
  bool fused_ = false;
  bool batched_ = false;
};

at::Tensor torch_linear(const at::Tensor& input, const at::Tensor& weight, const MaybeTensor& bias,
                        const MaybeTensor& /*parameter*/, std::int64_t /*recompute*/,
                        bool /*runs_again*/) {
  return at::linear(input, weight, bias);
}

at::Tensor linear_autograd(const at::Tensor& input, const at::Tensor& weight,
                           const MaybeTensor& bias, const MaybeTensor& parameter,
                           std::int64_t recompute, bool runs_again) {
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
  at::Tensor output =
      below_autograd([&] { return node->run(input, kept, weight, bias, weight.requires_grad()); });
  node->keep(kept, weight, bias, parameter, output, /*reads_weight=*/input.requires_grad(),
             recompute, runs_again && !node->is_batched());
  // For a loss alone, a copy that autocast made of the bias would be too much.
  const bool keeps_copy = is_given(bias) && (parameter.has_value() || !bias->is_leaf());
  if (recompute && input.requires_grad() && !node->is_batched() && !keeps_copy) {
    node->allow_to_run_again(kept, bias);
  }
  add_to_graph<false>(output, node);
  return output;
}

const LayerOperator<linear_autograd, torch_linear, CastTo::low> kLinear(
    "linear(Tensor input, Tensor weight, Tensor? bias, Tensor? parameter, int recompute, bool "
    "runs_again=False) -> Tensor",
    {kInGraphs});

}  // namespace

at::Tensor functional::linear(const at::Tensor& input, const at::Tensor& weight,
                              const MaybeTensor& bias, Again recompute, bool runs_again) {
  return kLinear(input, weight, bias, {}, recompute, runs_again);
}

}  // namespace brim::nn
