#include <brim/nn/conv.h>
#include <brim/nn/functional.h>
#include <brim/nn/linear.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <variant>

#include "nn/autograd/optional_tensor.h"

namespace brim::nn {
namespace {

template <std::size_t D>
using Options = torch::nn::detail::ConvNdOptions<D>;

template <std::size_t D>
using Numbers = std::array<std::int64_t, D>;

/// What to add at the end of each dimension to get the requested output size. torch::nn ignores the
/// dilation here; with it, the size is right for dilated kernels too.
template <std::size_t D>
Numbers<D> output_padding(const Options<D>& options, const at::Tensor& input,
                          at::IntArrayRef wanted) {
  TORCH_CHECK_VALUE(wanted.size() == D || wanted.size() == static_cast<std::size_t>(input.dim()),
                    "output_size must have ", D, " or ", input.dim(), " numbers, got ", wanted);
  wanted = wanted.slice(wanted.size() - D);
  const auto& padding = std::get<torch::ExpandingArray<D>>(options.padding());
  Numbers<D> result{};
  for (std::size_t i = 0; i < D; ++i) {
    const std::int64_t stride = (*options.stride())[i];
    const std::int64_t window = (*options.dilation())[i] * ((*options.kernel_size())[i] - 1) + 1;
    const std::int64_t size = input.size(static_cast<std::int64_t>(i) - static_cast<int>(D));
    const std::int64_t least = (size - 1) * stride - 2 * (*padding)[i] + window;
    TORCH_CHECK_VALUE(wanted[i] >= least && wanted[i] < least + stride, "output_size must be ",
                      least, " to ", least + stride - 1, " in dimension ", i, " for an input of ",
                      size, ", got ", wanted[i]);
    result[i] = wanted[i] - least;
  }
  return result;
}

template <std::size_t D>
at::Tensor run_transposed(const Options<D>& options, const at::Tensor& input,
                          const at::Tensor& weight, const at::Tensor& bias, Again recompute,
                          bool runs_again, const std::optional<at::IntArrayRef>& output_size) {
  TORCH_CHECK_VALUE(std::holds_alternative<torch::enumtype::kZeros>(options.padding_mode()),
                    "padding_mode of a transposed convolution must be kZeros");
  TORCH_CHECK_VALUE(input.dim() == static_cast<std::int64_t>(D) + 1 ||
                        input.dim() == static_cast<std::int64_t>(D) + 2,
                    "input must have ", D + 1, " or ", D + 2, " dimensions, got ", input.dim());
  const Numbers<D> added =
      output_size ? output_padding(options, input, *output_size) : *options.output_padding();
  return functional::conv_transpose(input, weight, maybe(bias), *options.stride(),
                                    *std::get<torch::ExpandingArray<D>>(options.padding()), added,
                                    options.groups(), *options.dilation(), recompute, runs_again);
}

}  // namespace

at::Tensor ConvTranspose1dImpl::forward(const at::Tensor& input,
                                        const std::optional<at::IntArrayRef>& output_size) {
  return run_transposed(options, input, weight, bias, recompute, runs_again, output_size);
}

at::Tensor ConvTranspose2dImpl::forward(const at::Tensor& input,
                                        const std::optional<at::IntArrayRef>& output_size) {
  return run_transposed(options, input, weight, bias, recompute, runs_again, output_size);
}

at::Tensor ConvTranspose3dImpl::forward(const at::Tensor& input,
                                        const std::optional<at::IntArrayRef>& output_size) {
  return run_transposed(options, input, weight, bias, recompute, runs_again, output_size);
}

at::Tensor LinearImpl::forward(const at::Tensor& input) {
  return functional::linear(input, weight, maybe(bias), recompute, runs_again);
}

}  // namespace brim::nn
