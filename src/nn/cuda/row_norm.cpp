#include "nn/cuda/row_norm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <array>

#include "nn/cuda/tensors.h"
#include "nn/ops/channels.h"

// The operators of ops/float32_rms_norm.cpp, ops/layer_norm.cpp and ops/group_norm.cpp on CUDA,
// which are not called for float64.

namespace brim::nn::cuda {
namespace {

/// One number per row, in float32.
at::Tensor empty_per_row(const at::Tensor& input, std::size_t dims) {
  c10::DimVector sizes(input.sizes());
  std::fill(sizes.end() - static_cast<std::ptrdiff_t>(dims), sizes.end(), 1);
  return at::empty(sizes, input.options().dtype(at::kFloat));
}

std::int64_t count_rows(const at::Tensor& input, std::int64_t size) {
  return size == 0 ? 0 : input.numel() / size;
}

struct Grads {
  at::Tensor input;
  at::Tensor weights;  // [columns]
};

/// @param x contiguous, as the rows are described
/// @param weight_type of the weights' gradient; nothing: not wanted
Grads backward_of(const NormRows& rows, const at::Tensor& grad, const at::Tensor& x,
                  const MaybeTensor& mean, const at::Tensor& rstd, bool wants_input,
                  std::optional<at::ScalarType> weight_type) {
  const at::Tensor up = grad.contiguous();
  const at::Tensor scale = rstd.contiguous();
  const at::Tensor level = is_given(mean) ? mean->contiguous() : at::Tensor();
  const std::int64_t columns = columns_of(rows);
  Grads grads;
  if (wants_input) {
    grads.input = at::empty_like(x);
  }
  at::Tensor sums;
  if (weight_type) {
    const auto options = x.options().dtype(weight_type);
    grads.weights = x.numel() == 0 ? at::zeros({columns}, options) : at::empty({columns}, options);
    sums = at::empty({parts_of(rows), columns}, x.options().dtype(at::kFloat));
  }
  launch_on(x, [&](cudaStream_t stream) {
    normalise_rows_backward(rows, up.const_data_ptr(), x.const_data_ptr(),
                            level.defined() ? level.const_data_ptr<float>() : nullptr,
                            scale.const_data_ptr<float>(),
                            wants_input ? grads.input.mutable_data_ptr() : nullptr,
                            weight_type ? sums.mutable_data_ptr<float>() : nullptr,
                            weight_type ? number_of(grads.weights, "brim::norm") : Number::float32,
                            weight_type ? grads.weights.mutable_data_ptr() : nullptr, stream);
  });
  return grads;
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
            .centred = false,
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
  at::Tensor rstd = empty_per_row(given.x, 1);
  launch_on(given.x, [&](cudaStream_t stream) {
    normalise_rows(given.rows, given.x.const_data_ptr(), static_cast<float>(eps),
                   output.mutable_data_ptr(), nullptr, rstd.mutable_data_ptr<float>(), stream);
  });
  return {std::move(output), std::move(rstd)};
}

std::tuple<at::Tensor, at::Tensor> rms_backward(const at::Tensor& grad, const at::Tensor& input,
                                                const at::Tensor& rstd, const MaybeTensor& weight,
                                                double offset, bool cast_first, bool input_grad,
                                                bool weight_grad) {
  const RmsRows given(input, weight, offset, cast_first);
  Grads grads = backward_of(given.rows, grad.to(given.product), given.x, {}, rstd, input_grad,
                            weight_grad ? std::optional(weight->scalar_type()) : std::nullopt);
  return {std::move(grads.input), std::move(grads.weights)};
}

// -- layer_norm of a low precision input in float32 -------------------------------------------

MaybeTensor wide(const MaybeTensor& weight) {
  return is_given(weight) ? MaybeTensor(weight->to(at::kFloat).contiguous()) : MaybeTensor();
}

/// An input, a weight and a bias as the kernels take them.
struct CentredRows {
  at::Tensor x;
  MaybeTensor weight;
  MaybeTensor bias;
  NormRows rows;

  /// @param shape of a row
  CentredRows(const at::Tensor& input, at::IntArrayRef shape, const MaybeTensor& factors,
              const MaybeTensor& moved)
      : x(input.contiguous()), weight(wide(factors)), bias(wide(moved)) {
    const std::int64_t size = c10::multiply_integers(shape);
    rows = {.rows = count_rows(x, size),
            .size = size,
            .centred = true,
            .type = number_of(x, "brim::norm"),
            .product = Number::float32,
            .weights = Number::float32,
            .weight = data_of(weight),
            .bias = data_of(bias),
            .offset = 0,
            .cast_first = false};
  }
};

NormGrads layer_forward(const at::Tensor& input, at::IntArrayRef shape, const MaybeTensor& weight,
                        const MaybeTensor& bias, double eps) {
  const CentredRows given(input, shape, weight, bias);
  at::Tensor output = at::empty_like(given.x, given.x.options().dtype(at::kFloat));
  at::Tensor mean = empty_per_row(given.x, shape.size());
  at::Tensor rstd = empty_per_row(given.x, shape.size());
  launch_on(given.x, [&](cudaStream_t stream) {
    normalise_rows(given.rows, given.x.const_data_ptr(), static_cast<float>(eps),
                   output.mutable_data_ptr(), mean.mutable_data_ptr<float>(),
                   rstd.mutable_data_ptr<float>(), stream);
  });
  return {std::move(output), std::move(mean), std::move(rstd)};
}

NormGrads layer_backward(const at::Tensor& grad, const at::Tensor& input, at::IntArrayRef shape,
                         const at::Tensor& mean, const at::Tensor& rstd, const MaybeTensor& weight,
                         const MaybeTensor& bias, std::array<bool, 3> mask) {
  const CentredRows given(input, shape, weight, {});
  const Grads grads = backward_of(given.rows, grad.to(at::kFloat), given.x, mean, rstd, mask[0],
                                  mask[1] || mask[2] ? std::optional(at::kFloat) : std::nullopt);
  // Of their own memory each: they become the gradients of parameters.
  const auto copy = [&](std::int64_t first, const MaybeTensor& of) {
    const at::Tensor part = grads.weights.narrow(0, first, given.rows.size);
    return part.view(shape).to(of->scalar_type(), false, true);
  };
  return {grads.input, mask[1] ? copy(0, weight) : at::Tensor(),
          mask[2] ? copy(given.rows.size, bias) : at::Tensor()};
}

// -- layer_norm and group_norm from their statistics ------------------------------------------

/// What a norm was given and found, and its output.
struct NormAgain : CentredRows {
  at::Tensor mean;
  at::Tensor rstd;
  at::Tensor output;

  NormAgain(const at::Tensor& input, at::IntArrayRef shape, const at::Tensor& means,
            const at::Tensor& rstds, const MaybeTensor& factors, const MaybeTensor& moved,
            at::ScalarType type)
      : CentredRows(input, shape, factors, moved),
        mean(means.contiguous()),
        rstd(rstds.contiguous()),
        output(at::empty_like(x, x.options().dtype(type))) {
    rows.product = number_of(output, "brim::norm");
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
  m.impl("layer_norm_as_float32", layer_forward);
  m.impl("layer_norm_as_float32_backward", layer_backward);
  m.impl("layer_norm_as_type", layer_as_type);
  m.impl("group_norm_as_type", group_as_type);
}

}  // namespace brim::nn::cuda
