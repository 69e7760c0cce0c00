#include <ATen/ops/conv1d.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/conv3d.h>
#include <ATen/ops/conv_transpose1d.h>
#include <ATen/ops/conv_transpose2d.h>
#include <ATen/ops/conv_transpose3d.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <brim/nn/functional.h>
#include <c10/util/DimVector.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>

#include <array>
#include <tuple>
#include <utility>

#include "nn/autograd/operator.h"
#include "nn/autograd/product_layer_node.h"

namespace brim::nn {
namespace {

/// Of the input's spatial dimensions, up to three.
using Numbers = c10::DimVector;
using Sizes = c10::SymDimVector;

struct Options {
  Numbers stride;
  Numbers padding;
  Numbers dilation;
  bool transposed;
  Numbers output_padding;
  std::int64_t groups;
};

c10::SymIntArrayRef symbolic(at::IntArrayRef values) {
  return c10::fromIntArrayRefUnchecked(values);  // options are never symbolic
}

constexpr std::array<const char*, 4> kLists = {"stride", "padding", "dilation", "output_padding"};

std::int64_t spatial_dimensions(const at::Tensor& weight) {
  TORCH_CHECK_VALUE(weight.dim() >= 3 && weight.dim() <= 5,
                    "weight must have 3, 4 or 5 dimensions, got ", weight.dim());
  return weight.dim() - 2;
}

/// @param lists in the order of kLists
void check(const at::Tensor& input, const at::Tensor& weight,
           const std::array<at::IntArrayRef, 4>& lists) {
  const std::int64_t dimensions = spatial_dimensions(weight);
  TORCH_CHECK(input.dim() == dimensions + 2 || input.dim() == dimensions + 1, "input must have ",
              dimensions + 2, " dimensions (or ", dimensions + 1,
              " without a batch), as the weight has, got ", input.dim());
  for (std::size_t i = 0; i < lists.size(); ++i) {
    TORCH_CHECK_VALUE(std::cmp_equal(lists[i].size(), dimensions), kLists[i], " must have ",
                      dimensions, " numbers, one per spatial dimension of the weight, got ",
                      lists[i]);
  }
}

/// With autograd or below it, as the caller is.
at::Tensor run(const at::Tensor& input, const at::Tensor& weight, const MaybeTensor& bias,
               const Options& options) {
  if (input.dim() != weight.dim()) {
    return run(input.unsqueeze(0), weight, bias, options).squeeze(0);
  }
  return at::convolution(input, weight, bias, options.stride, options.padding, options.dilation,
                         options.transposed, options.output_padding, options.groups);
}

/// convolution_backward, where only the input's sizes count, not its values: nothing writes or
/// reads the stand-in, and it is gone afterwards.
at::Tensor input_grad_like_torch(const at::Tensor& grad, const at::Tensor& weight,
                                 const Sizes& sizes, const Options& options,
                                 at::MemoryFormat format) {
  c10::SymDimVector all = {grad.sym_size(0), options.transposed
                                                 ? weight.sym_size(0)
                                                 : weight.sym_size(1) * options.groups};
  all.append(sizes.begin(), sizes.end());
  return std::get<0>(at::convolution_backward_symint(
      grad, at::empty_symint(all, grad.options(), format), weight, {}, symbolic(options.stride),
      symbolic(options.padding), symbolic(options.dilation), options.transposed,
      symbolic(options.output_padding), options.groups, {true, false, false}));
}

/// The gradient of the input of a convolution is a convolution itself, transposed, and needs no
/// input. Not on the CPU: there oneDNN has other kernels for it, which on ARM lose digits (in
/// float16 the error is 15 times that of convolution_backward).
/// @param sizes of the input's spatial dimensions
/// @param format of the forward pass, which torch's backward keeps whatever the gradient has
at::Tensor input_grad(const at::Tensor& any_grad, const at::Tensor& weight, const Sizes& sizes,
                      const Options& options, at::MemoryFormat format) {
  // A clone, not contiguous(): a single channel fits both formats, and its strides decide.
  const at::Tensor grad = is_traced(any_grad) || any_grad.suggest_memory_format() == format
                              ? any_grad
                              : any_grad.clone(format);
  if (grad.is_cpu()) {
    return input_grad_like_torch(grad, weight, sizes, options, format);
  }
  Sizes output_padding(sizes.size(), c10::SymInt(0));
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (!options.transposed) {
      // Several sizes of the input give the same output; this says which it was.
      const auto place = static_cast<std::int64_t>(i) + 2;
      const c10::SymInt least = (grad.sym_size(place) - 1) * options.stride[i] -
                                2 * options.padding[i] +
                                options.dilation[i] * (weight.sym_size(place) - 1) + 1;
      output_padding[i] = sizes[i] - least;
    } else if (options.output_padding[i] >= options.stride[i]) {
      // Allowed below the dilation: a convolution would give more positions than the input has.
      return input_grad_like_torch(grad, weight, sizes, options, format);
    }
  }
  return at::convolution_symint(grad, weight, {}, symbolic(options.stride),
                                symbolic(options.padding), symbolic(options.dilation),
                                !options.transposed, output_padding, options.groups);
}

class ConvNode final : public ProductLayerNode {
 public:
  ConvNode(const Options& options, const at::Tensor& input, const at::Tensor& weight,
           const MaybeTensor& bias, Again recompute)
      : ProductLayerNode(input, /*holds_output=*/recompute),
        options_(options),
        batched_(input.dim() == weight.dim()),
        has_bias_(is_given(bias)),
        trains_weight_(weight.requires_grad()) {
    const auto sizes = input.sym_sizes();
    sizes_ = Sizes(sizes.slice(sizes.size() - options.stride.size()));
  }

  void keep_format(const at::Tensor& output) { format_ = output.suggest_memory_format(); }

  std::string name() const override { return "brim::conv_backward"; }

 private:
  at::Tensor run_again(const at::Tensor& input, const at::Tensor& weight,
                       const MaybeTensor& bias) const override {
    return run(input, weight, bias, options_);
  }

  variable_list backward(const at::Tensor& given) override {
    variable_list result(3);
    again_.reset();
    // torch has no rule of autocast for the backward of a convolution, but one for convolution.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const at::Tensor grad = batched_ ? given : given.unsqueeze(0);
    const bool asked_for_weight = task_should_compute_output(1);
    if (trains_weight_ && (asked_for_weight || input_.is_kept())) {
      all_grads(grad, asked_for_weight, result);
    } else {
      if (task_should_compute_output(0)) {
        result[0] = tied_to(next_edge(0),
                            input_grad(grad, take_weight(), sizes_, options_, format_), false);
      }
      if (task_should_compute_output(2)) {
        result[2] = bias_grad(grad);
      }
    }
    if (!batched_ && result[0].defined()) {
      result[0] = result[0].squeeze(0);
    }
    return result;
  }

  void all_grads(const at::Tensor& grad, bool asked_for_weight, variable_list& result) {
    const Options& options = options_;
    const at::Tensor kept = input_.take();
    const std::array<c10::SymInt, 1> bias_size = {grad.sym_size(1)};
    std::tie(result[0], result[1], result[2]) = at::convolution_backward_symint(
        grad, batched_ ? kept : kept.unsqueeze(0), take_weight(),
        has_bias_ ? at::OptionalSymIntArrayRef(bias_size) : at::OptionalSymIntArrayRef(),
        symbolic(options.stride), symbolic(options.padding), symbolic(options.dilation),
        options.transposed, symbolic(options.output_padding), options.groups,
        {task_should_compute_output(0), asked_for_weight, task_should_compute_output(2)});
    if (!asked_for_weight) {
      result[1].reset();  // some of torch's kernels give it all the same
    }
  }

  static at::Tensor bias_grad(const at::Tensor& grad) {
    constexpr std::array<std::int64_t, 4> kAllButChannels = {0, 2, 3, 4};
    return grad.sum(
        at::IntArrayRef(kAllButChannels.data(), static_cast<std::size_t>(grad.dim() - 1)));
  }

  Options options_;
  Sizes sizes_;
  at::MemoryFormat format_ = at::MemoryFormat::Contiguous;
  bool batched_;
  bool has_bias_;
  bool trains_weight_;
};

at::Tensor conv_autograd(const at::Tensor& input, const at::Tensor& weight, const MaybeTensor& bias,
                         at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                         bool transposed, at::IntArrayRef output_padding, std::int64_t groups,
                         const MaybeTensor& parameter, std::int64_t recompute, bool runs_again) {
  check(input, weight, {stride, padding, dilation, output_padding});
  const Options options{Numbers(stride), Numbers(padding),        Numbers(dilation),
                        transposed,      Numbers(output_padding), groups};
  if (!needs_grad(input, weight, bias)) {
    const BelowAutograd below;
    return run(input, weight, bias, options);
  }
  if (weight.sym_numel() == 0) {  // no channels: torch has rules of its own for it
    return run(input, weight, bias, options);
  }
  const auto node = make_node<ConvNode>(options, input, weight, bias, recompute);
  node->set_next_edges(torch::autograd::collect_next_edges(input, weight, bias));
  at::Tensor output = below_autograd([&] { return run(input, weight, bias, options); });
  // For its own gradient only the weight's form is needed, but torch asks for a tensor.
  const bool reads_weight = input.requires_grad() || weight.requires_grad();
  node->keep(input, weight, bias, parameter, output, reads_weight, recompute, runs_again);
  node->keep_format(output);
  add_to_graph<false>(output, node);
  return output;
}

/// torch's own function for this number of dimensions, which keeps what torch keeps.
at::Tensor torch_conv(const at::Tensor& input, const at::Tensor& weight, const MaybeTensor& bias,
                      at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                      bool transposed, at::IntArrayRef output_padding, std::int64_t groups,
                      const MaybeTensor& /*parameter*/, std::int64_t /*recompute*/,
                      bool /*runs_again*/) {
  switch (stride.size()) {
    case 1:
      return transposed ? at::conv_transpose1d(input, weight, bias, stride, padding, output_padding,
                                               groups, dilation)
                        : at::conv1d(input, weight, bias, stride, padding, dilation, groups);
    case 2:
      return transposed ? at::conv_transpose2d(input, weight, bias, stride, padding, output_padding,
                                               groups, dilation)
                        : at::conv2d(input, weight, bias, stride, padding, dilation, groups);
    default:
      return transposed ? at::conv_transpose3d(input, weight, bias, stride, padding, output_padding,
                                               groups, dilation)
                        : at::conv3d(input, weight, bias, stride, padding, dilation, groups);
  }
}

const LayerOperator<conv_autograd, torch_conv, CastTo::low> kConv(
    "conv(Tensor input, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation,"
    " bool transposed, int[] output_padding, int groups, Tensor? parameter, int recompute,"
    " bool runs_again=False) -> Tensor",
    {kInGraphs});

/// One number per dimension out of none (the default), one, or as many.
Numbers per_dimension(at::IntArrayRef values, const at::Tensor& weight, std::int64_t otherwise) {
  const auto dimensions = static_cast<std::size_t>(spatial_dimensions(weight));
  return values.size() > 1 ? Numbers(values)
                           : Numbers(dimensions, values.empty() ? otherwise : values[0]);
}

at::Tensor call(const at::Tensor& input, const at::Tensor& weight, const MaybeTensor& bias,
                at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                bool transposed, at::IntArrayRef output_padding, std::int64_t groups,
                Again recompute, bool runs_again) {
  const Numbers steps = per_dimension(stride, weight, 1);
  const Numbers padded = per_dimension(padding, weight, 0);
  const Numbers dilated = per_dimension(dilation, weight, 1);
  const Numbers output_padded = per_dimension(output_padding, weight, 0);
  check(input, weight, {steps, padded, dilated, output_padded});  // torch_conv does not
  return kConv(input, weight, bias, steps, padded, dilated, transposed, output_padded, groups, {},
               recompute, runs_again);
}

}  // namespace

at::Tensor functional::conv(const at::Tensor& input, const at::Tensor& weight,
                            const MaybeTensor& bias, at::IntArrayRef stride,
                            at::IntArrayRef padding, at::IntArrayRef dilation, std::int64_t groups,
                            Again recompute, bool runs_again) {
  return call(input, weight, bias, stride, padding, dilation, false, {}, groups, recompute,
              runs_again);
}

at::Tensor functional::conv_transpose(const at::Tensor& input, const at::Tensor& weight,
                                      const MaybeTensor& bias, at::IntArrayRef stride,
                                      at::IntArrayRef padding, at::IntArrayRef output_padding,
                                      std::int64_t groups, at::IntArrayRef dilation,
                                      Again recompute, bool runs_again) {
  return call(input, weight, bias, stride, padding, dilation, true, output_padding, groups,
              recompute, runs_again);
}

}  // namespace brim::nn
