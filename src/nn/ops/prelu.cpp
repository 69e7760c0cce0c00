#include <ATen/ops/_prelu_kernel_backward.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/prelu.h>
#include <brim/nn/functional.h>

#include "nn/autograd/linear_history.h"
#include "nn/autograd/operator.h"
#include "nn/ops/bits.h"

namespace brim::nn {
namespace {

/// The weight in the shape that torch's operator gives it: one factor for all, or per channel.
at::Tensor factors(const at::Tensor& weight, std::int64_t dims) {
  if (weight.dim() == dims) {
    return weight;
  }
  c10::SymDimVector shape(static_cast<std::size_t>(dims), 1);
  if (dims > 1) {
    shape[1] = weight.sym_numel();
  }
  return weight.reshape_symint(shape);
}

/// With a frozen weight: keeps one bit per element, set where the input is above zero.
at::Tensor prelu_autograd(const at::Tensor& input, const at::Tensor& weight) {
  if (weight.requires_grad() || !needs_grad(input)) {  // the weight's gradient needs the input
    return at::prelu(input, weight);
  }
  const auto [output, bits, strides] = below_autograd([&] {
    const at::Tensor source = dense(input);
    return std::tuple(at::prelu(input, weight), pack_bits(source.gt(0)),
                      c10::SymDimVector(source.sym_strides()));
  });
  set_linear_history(
      output, input, "brim::prelu_backward", true,
      [strides, read = c10::SymDimVector(input.sym_strides())](
          const at::Tensor& grad, const at::Tensor& kept, const at::Tensor& slope) {
        // Of the input, torch's kernel reads only the signs for the input's gradient.
        const at::Tensor signs = apply_bits(at::ones_like(grad), kept, strides, 1, -1);
        const at::Tensor result =
            std::get<0>(at::_prelu_kernel_backward(grad, signs, factors(slope, grad.dim())));
        return as_elementwise(result, read, grad.sym_strides());
      },
      bits, weight);
  return output;
}

const LayerOperator<prelu_autograd, at::prelu, CastTo::low> kPrelu(
    "prelu(Tensor input, Tensor weight) -> Tensor", {kInGraphs});

}  // namespace

at::Tensor functional::prelu(const at::Tensor& input, const at::Tensor& weight) {
  return kPrelu(input, weight);
}

}  // namespace brim::nn
