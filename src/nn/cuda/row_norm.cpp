#include "nn/cuda/row_norm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "nn/cuda/tensors.h"
#include "nn/ops/channels.h"

// The operators of ops/float32_rms_norm.cpp, ops/layer_norm.cpp and ops/group_norm.cpp on CUDA,
// which are not called for float64.

namespace brim::nn::cuda {
namespace {

std::int64_t count_rows(const at::Tensor& input, std::int64_t size) {
  return size == 0 ? 0 : input.numel() / size;
}

// -- float32_rms_norm -------------------------------------------------------------------------

/// An input and a weight as the kernels take them.
struct RmsRows {
  at::Tensor x;
  MaybeTensor weight;
  at::ScalarType product;
  NormRows rows;

  RmsRows(const at::Tensor& input, const MaybeTensor& given, double offset, bool cast_first)
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
    const Number type = number_of(x, "brim::float32_rms_norm");
    rows = {.rows = count_rows(x, x.size(-1)),
            .size = x.size(-1),
            .type = type,
            .product = product == x.scalar_type() ? type : Number::float32,
            .weights = weight ? number_of(*weight, "brim::float32_rms_norm") : type,
            .weight = data_of(weight),
            .bias = nullptr,
            .offset = cast_first ? 0 : static_cast<float>(offset),
            .cast_first = cast_first};
  }
};

std::tuple<at::Tensor, at::Tensor> rms_forward(const at::Tensor& input, const MaybeTensor& weight,
                                               double eps, double offset, bool cast_first) {
  const RmsRows given(input, weight, offset, cast_first);
  at::Tensor output = at::empty_like(given.x, given.x.options().dtype(given.product));
  c10::DimVector per_row(given.x.sizes());
  per_row.back() = 1;
  at::Tensor rstd = at::empty(per_row, given.x.options().dtype(at::kFloat));
  launch_on(given.x, [&](cudaStream_t stream) {
    normalise_rows(given.rows, given.x.const_data_ptr(), static_cast<float>(eps),
                   output.mutable_data_ptr(), rstd.mutable_data_ptr<float>(), stream);
  });
  return {std::move(output), std::move(rstd)};
}

std::tuple<at::Tensor, at::Tensor> rms_backward(const at::Tensor& grad, const at::Tensor& input,
                                                const at::Tensor& rstd, const MaybeTensor& weight,
                                                double offset, bool cast_first, bool input_grad,
                                                bool weight_grad) {
  const RmsRows given(input, weight, offset, cast_first);
  const at::Tensor& x = given.x;
  const std::int64_t size = given.rows.size;
  const at::Tensor up = grad.to(given.product).contiguous();
  const at::Tensor scale = rstd.contiguous();
  at::Tensor of_input = input_grad ? at::empty_like(x) : at::Tensor();
  at::Tensor of_weight;
  at::Tensor sums;
  if (weight_grad) {
    const auto options = x.options().dtype(weight->scalar_type());
    of_weight = x.numel() == 0 ? at::zeros({size}, options) : at::empty({size}, options);
    sums = at::empty({parts_of(given.rows), size}, x.options().dtype(at::kFloat));
  }
  launch_on(x, [&](cudaStream_t stream) {
    normalise_rows_backward(
        given.rows, up.const_data_ptr(), x.const_data_ptr(), scale.const_data_ptr<float>(),
        input_grad ? of_input.mutable_data_ptr() : nullptr,
        weight_grad ? sums.mutable_data_ptr<float>() : nullptr,
        weight_grad ? number_of(of_weight, "brim::float32_rms_norm") : Number::float32,
        weight_grad ? of_weight.mutable_data_ptr() : nullptr, stream);
  });
  return {std::move(of_input), std::move(of_weight)};
}

// -- layer_norm and group_norm from their statistics ------------------------------------------

MaybeTensor wide(const MaybeTensor& weight) {
  return is_given(weight) ? MaybeTensor(weight->to(at::kFloat).contiguous()) : MaybeTensor();
}

/// What a norm was given and found as the kernels take it, and room for its output.
struct NormAgain {
  at::Tensor x;
  at::Tensor mean;
  at::Tensor rstd;
  MaybeTensor weight;
  MaybeTensor bias;
  at::Tensor output;
  NormRows rows;

  /// @param shape of a row
  NormAgain(const at::Tensor& input, at::IntArrayRef shape, const at::Tensor& means,
            const at::Tensor& rstds, const MaybeTensor& factors, const MaybeTensor& moved,
            at::ScalarType type)
      : x(input.contiguous()),
        mean(means.contiguous()),
        rstd(rstds.contiguous()),
        weight(wide(factors)),
        bias(wide(moved)),
        output(at::empty_like(x, x.options().dtype(type))) {
    const std::int64_t size = c10::multiply_integers(shape);
    rows = {.rows = count_rows(x, size),
            .size = size,
            .type = number_of(x, "brim::norm"),
            .product = number_of(output, "brim::norm"),
            .weights = Number::float32,
            .weight = data_of(weight),
            .bias = data_of(bias),
            .offset = 0,
            .cast_first = false};
  }
};

at::Tensor layer_as_type(const at::Tensor& input, at::IntArrayRef shape, const at::Tensor& mean,
                         const at::Tensor& rstd, const MaybeTensor& weight, const MaybeTensor& bias,
                         double /*eps*/, at::ScalarType type) {
  const NormAgain norm(input, shape, mean, rstd, weight, bias, type);
  launch_on(norm.x, [&](cudaStream_t stream) {
    normalise_rows_as(norm.rows, norm.x.const_data_ptr(), norm.mean.const_data_ptr<float>(),
                      norm.rstd.const_data_ptr<float>(), norm.output.mutable_data_ptr(), stream);
  });
  return norm.output;
}

at::Tensor group_as_type(const at::Tensor& input, std::int64_t groups, const at::Tensor& mean,
                         const at::Tensor& rstd, const MaybeTensor& weight, const MaybeTensor& bias,
                         double /*eps*/, at::ScalarType type) {
  const NormAgain norm(input, input.sizes().slice(2), mean, rstd, weight, bias, type);
  const std::int64_t channels = input.size(1);
  launch_on(norm.x, [&](cudaStream_t stream) {
    normalise_groups_as(norm.rows, channels, channels / groups, norm.x.const_data_ptr(),
                        norm.mean.const_data_ptr<float>(), norm.rstd.const_data_ptr<float>(),
                        norm.output.mutable_data_ptr(), stream);
  });
  return norm.output;
}

}  // namespace

TORCH_LIBRARY_IMPL(brim, CUDA, m) {
  m.impl("float32_rms_norm_forward", rms_forward);
  m.impl("float32_rms_norm_backward", rms_backward);
  m.impl("layer_norm_as_type", layer_as_type);
  m.impl("group_norm_as_type", group_as_type);
}

}  // namespace brim::nn::cuda
