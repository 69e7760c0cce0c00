#include "nn/ops/pad.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/pad.h>
#include <ATen/ops/reflection_pad1d_backward.h>
#include <ATen/ops/reflection_pad2d_backward.h>
#include <ATen/ops/reflection_pad3d_backward.h>
#include <ATen/ops/replication_pad1d_backward.h>
#include <ATen/ops/replication_pad2d_backward.h>
#include <ATen/ops/replication_pad3d_backward.h>

#include <array>

#include "nn/autograd/linear_history.h"
#include "nn/autograd/operator.h"

namespace brim::nn {
namespace {

using Backward = at::Tensor (*)(const at::Tensor&, const at::Tensor&, at::IntArrayRef);

/// For one, two and three dimensions.
constexpr std::array<Backward, 3> kReflect = {
    at::reflection_pad1d_backward, at::reflection_pad2d_backward, at::reflection_pad3d_backward};
constexpr std::array<Backward, 3> kReplicate = {
    at::replication_pad1d_backward, at::replication_pad2d_backward, at::replication_pad3d_backward};

at::Tensor torch_pad(const at::Tensor& input, at::IntArrayRef padding, std::string_view mode) {
  return at::pad(input, padding, mode);
}

at::Tensor pad_autograd(const at::Tensor& input, at::IntArrayRef padding, std::string_view mode) {
  const std::size_t dims = padding.size() / 2;
  // Of the others torch keeps nothing, or knows what is wrong with them.
  const bool keeps = (mode == "reflect" || mode == "replicate") && dims >= 1 && dims <= 3;
  if (!needs_grad(input) || !keeps || is_traced(input)) {
    return at::pad(input, padding, mode);
  }
  at::Tensor output = below_autograd([&] { return at::pad(input, padding, mode); });
  const Backward backward = (mode == "reflect" ? kReflect : kReplicate)[dims - 1];
  set_linear_history(
      output, input, "brim::pad_backward", true,
      [backward, sizes = c10::DimVector(input.sizes()), padded = c10::DimVector(padding),
       format = input.suggest_memory_format(),
       type = input.scalar_type()](const at::Tensor& grad) {  // autocast pads in float32
        // torch's function asks for the input, and looks at its form only.
        const at::Tensor form = at::empty(sizes, grad.options(), format);
        return backward(grad, form, padded).to(type);
      });
  return output;
}

const LayerOperator<pad_autograd, torch_pad> kPad(
    "pad(Tensor input, int[] pad, str mode) -> Tensor");

}  // namespace

at::Tensor pad(const at::Tensor& input, at::IntArrayRef padding, std::string_view mode) {
  return kPad(input, padding, mode);
}

}  // namespace brim::nn
