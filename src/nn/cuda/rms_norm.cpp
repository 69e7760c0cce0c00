#include "nn/cuda/rms_norm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "nn/autograd/optional_tensor.h"
#include "nn/cuda/tensors.h"

// The operators of ops/float32_rms_norm.cpp on CUDA, which are not called for float64.

namespace brim::nn::cuda {
namespace {

constexpr const char* kName = "brim::float32_rms_norm";

/// An input and a weight as the kernels take them.
struct Rows {
  at::Tensor x;
  MaybeTensor weight;
  at::ScalarType product;
  RmsRows rows;

  Rows(const at::Tensor& input, const MaybeTensor& given, double offset, bool cast_first)
      : x(input.contiguous()), product(x.scalar_type()) {
    if (is_given(given)) {
      weight = given->contiguous();
      if (cast_first) {
        product = c10::promoteTypes(product, weight->scalar_type());
        weight = offset == 0 ? *weight : weight->add(offset);  // in its own type
      }
      if (weight->scalar_type() != x.scalar_type()) {
        weight = weight->to(at::kFloat);
      }
    }
    const Number type = number_of(x, kName);
    rows = {x.numel() / std::max<std::int64_t>(1, x.size(-1)),
            x.size(-1),
            type,
            product == x.scalar_type() ? type : Number::float32,
            weight ? number_of(*weight, kName) : type,
            weight ? weight->const_data_ptr() : nullptr,
            cast_first ? 0 : static_cast<float>(offset),
            cast_first};
  }
};

std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& input, const MaybeTensor& weight,
                                           double eps, double offset, bool cast_first) {
  const Rows given(input, weight, offset, cast_first);
  c10::DimVector per_row(input.sizes());
  per_row.back() = 1;
  at::Tensor output = at::empty_like(given.x, given.x.options().dtype(given.product));
  at::Tensor rstd = at::empty(per_row, given.x.options().dtype(at::kFloat));
  launch_on(given.x, [&](cudaStream_t stream) {
    rms_norm(given.rows, given.x.const_data_ptr(), static_cast<float>(eps),
             output.mutable_data_ptr(), rstd.mutable_data_ptr<float>(), stream);
  });
  return {std::move(output), std::move(rstd)};
}

std::tuple<at::Tensor, at::Tensor> backward(const at::Tensor& grad, const at::Tensor& input,
                                            const at::Tensor& rstd, const MaybeTensor& weight,
                                            double offset, bool cast_first, bool input_grad,
                                            bool weight_grad) {
  const Rows given(input, weight, offset, cast_first);
  const RmsRows& rows = given.rows;
  const at::Tensor up = grad.to(given.product).contiguous();
  const at::Tensor scale = rstd.contiguous();
  at::Tensor of_input = input_grad ? at::empty_like(given.x) : at::Tensor();
  if (given.x.numel() == 0) {
    return {std::move(of_input), weight_grad ? at::zeros_like(*weight) : at::Tensor()};
  }
  at::Tensor of_weight;
  at::Tensor sums;
  if (weight_grad) {
    of_weight = at::empty_like(*weight, {}, at::MemoryFormat::Contiguous);
    sums = at::empty({parts_of(rows), rows.size}, given.x.options().dtype(at::kFloat));
  }
  launch_on(given.x, [&](cudaStream_t stream) {
    rms_norm_backward(rows, up.const_data_ptr(), given.x.const_data_ptr(),
                      scale.const_data_ptr<float>(),
                      input_grad ? of_input.mutable_data_ptr() : nullptr,
                      weight_grad ? sums.mutable_data_ptr<float>() : nullptr,
                      weight_grad ? number_of(of_weight, kName) : Number::float32,
                      weight_grad ? of_weight.mutable_data_ptr() : nullptr, stream);
  });
  return {std::move(of_input), std::move(of_weight)};
}

}  // namespace

TORCH_LIBRARY_IMPL(brim, CUDA, m) {
  m.impl("float32_rms_norm_forward", forward);
  m.impl("float32_rms_norm_backward", backward);
}

}  // namespace brim::nn::cuda
