#pragma once

#include <ATen/core/Tensor.h>
#include <brim/export.h>
#include <brim/nn/again.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>

/// The layers as functions, beside those of `torch::nn::functional`: the same values and gradients,
/// and for backward only what is needed at this call. What a function keeps follows from what needs
/// a gradient now (input, weight, bias), so freezing a weight takes effect with the next call.
///
///     namespace F = brim::nn::functional;
///     at::Tensor y = F::relu(F::conv(x, weight, bias, {1, 1}, {1, 1}, {1, 1}));
///
/// Known are dense tensors of float32, float64, bfloat16 and float16 on the CPU and on CUDA. For
/// every other one (nested, sparse, quantized, mkldnn, complex and whole numbers, other devices,
/// tensors with forward-mode derivatives) torch's own operator runs, with its results, its errors
/// and what it keeps. All are operators of torch (`torch.ops.brim`), so they follow autocast,
/// torch.compile and torch.func. Threads: as torch's own functions.
namespace brim::nn::functional {

// -- Activations: one bit per element, or nothing where the consumer keeps the output -----------

/// The input, 0 where it is negative.
/// @param recompute of every activation: keep nothing where the layer before can recompute its
///        output in backward
BRIM_API at::Tensor relu(const at::Tensor& input, bool inplace = false, Again recompute = false);
/// The input, held between 0 and 6.
BRIM_API at::Tensor relu6(const at::Tensor& input, bool inplace = false, Again recompute = false);

/// The input, held between two bounds.
/// @throws c10::ValueError if min_val > max_val.
BRIM_API at::Tensor hardtanh(const at::Tensor& input, double min_val = -1, double max_val = 1,
                             bool inplace = false, Again recompute = false);
/// The input, times `negative_slope` where it is negative.
BRIM_API at::Tensor leaky_relu(const at::Tensor& input, double negative_slope = 0.01,
                               bool inplace = false, Again recompute = false);
/// A sigmoid of straight lines.
BRIM_API at::Tensor hardsigmoid(const at::Tensor& input, bool inplace = false,
                                Again recompute = false);
/// The input, `value` where it is not above `threshold`.
BRIM_API at::Tensor threshold(const at::Tensor& input, double threshold, double value,
                              bool inplace = false, Again recompute = false);

/// Keeps its input where the weight is trained, else one bit per element.
BRIM_API at::Tensor prelu(const at::Tensor& input, const at::Tensor& weight);

// -- Activations that keep their input, as torch does: nothing smaller is exact -----------------

/// The input times the share of a normal distribution below it.
/// @param approximate "none" or "tanh"
BRIM_API at::Tensor gelu(const at::Tensor& input, std::string_view approximate = "none",
                         Again recompute = false);
/// The input times its sigmoid.
BRIM_API at::Tensor silu(const at::Tensor& input, bool inplace = false, Again recompute = false);
/// The input times its hardsigmoid.
BRIM_API at::Tensor hardswish(const at::Tensor& input, bool inplace = false,
                              Again recompute = false);
/// The input times the tanh of its softplus.
BRIM_API at::Tensor mish(const at::Tensor& input, bool inplace = false, Again recompute = false);
/// log(1 + exp(beta x)) / beta, and the input itself where beta x > threshold.
BRIM_API at::Tensor softplus(const at::Tensor& input, double beta = 1, double threshold = 20,
                             Again recompute = false);
/// The input, alpha (exp(x) - 1) where it is negative.
/// In place: keeps its output.
BRIM_API at::Tensor elu(const at::Tensor& input, double alpha = 1, bool inplace = false,
                        Again recompute = false);
/// The same with exp(x / alpha).
BRIM_API at::Tensor celu(const at::Tensor& input, double alpha = 1, bool inplace = false,
                         Again recompute = false);
/// The elu of one alpha, times a factor, which keep mean and variance of normal numbers.
BRIM_API at::Tensor selu(const at::Tensor& input, bool inplace = false, Again recompute = false);
/// log(1 / (1 + exp(-x))). torch keeps two tensors on the CPU.
BRIM_API at::Tensor logsigmoid(const at::Tensor& input, Again recompute = false);
/// x / (1 + |x|). torch keeps two tensors.
BRIM_API at::Tensor softsign(const at::Tensor& input, Again recompute = false);

// -- Activations that keep their output, as torch does ------------------------------------------

/// 1 / (1 + exp(-x)).
BRIM_API at::Tensor sigmoid(const at::Tensor& input, Again recompute = false);
/// The hyperbolic tangent.
BRIM_API at::Tensor tanh(const at::Tensor& input, Again recompute = false);

// -- Activations by name, alone and as gates: their inputs are kept, and nothing inside ---------

/// @param name torch's own: silu, gelu, gelu_tanh, relu, sigmoid, tanh, mish, hardswish; or one
///        that models write out, operator by operator as they do: new_gelu, fast_gelu, erf_gelu,
///        quick_gelu, clipped_gelu (to -10 and 10), swish, softplus_mish, sqrt_softplus,
///        relu_squared, laplace. The result has the type that these operators give it, also under
///        autocast.
/// @throws c10::ValueError for another name.
BRIM_API at::Tensor activation(const at::Tensor& input, std::string_view name,
                               Again recompute = false);

/// act(gate) * up, as the MLPs of language models have it (SwiGLU, GEGLU). Values and gradients are
/// those of the two operators.
/// @param activation a name, see above
BRIM_API at::Tensor gated(const at::Tensor& gate, const at::Tensor& up,
                          std::string_view activation = "silu", Again recompute = false);

/// The same where `gate` and `up` are the halves of one tensor, which is kept; one gradient.
/// @throws c10::ValueError if its size in `dim` is odd.
BRIM_API at::Tensor gated_packed(const at::Tensor& packed, std::string_view activation = "silu",
                                 bool gate_first = true, std::int64_t dim = -1,
                                 Again recompute = false);

// -- Sums and products ---------------------------------------------------------------------------

/// As torch's `add`, with broadcasting; keeps nothing. In backward it can be recomputed from its
/// operands, also where these are such sums (residual blocks).
BRIM_API at::Tensor add(const at::Tensor& input, const at::Tensor& other, bool inplace = false);

/// As torch's `mul`, with broadcasting: each factor is kept only where the other one needs a
/// gradient.
/// @param recompute keep no factor that the layer before can recompute in backward
BRIM_API at::Tensor mul(const at::Tensor& input, const at::Tensor& other, Again recompute = false);

// -- Dropout ------------------------------------------------------------------------------------

/// Keeps one bit per element. Draws the same random numbers as torch's own dropout.
/// @throws c10::ValueError unless 0 <= p <= 1.
BRIM_API at::Tensor dropout(const at::Tensor& input, double p = 0.5, bool training = true,
                            bool inplace = false);

// -- Weights: the input is kept only where the weight needs a gradient -------------------------

/// @param recompute keep no input where the layer before can give it again cheaply in backward
///        (normalisation, activation, dropout, and sums of those): the same bits, more time.
/// @param runs_again of linear layers and convolutions: if the output is larger than the input, the
///        next layer need not keep it (an activation with `recompute`, a normalisation). The
///        product runs again in backward then.
BRIM_API at::Tensor linear(const at::Tensor& input, const at::Tensor& weight,
                           const std::optional<at::Tensor>& bias = {}, Again recompute = false,
                           bool runs_again = false);

/// Convolution over one, two or three dimensions, as the weight has; the input may lack the batch.
/// Options hold one number, or one a dimension; empty ones stand for torch's default.
BRIM_API at::Tensor conv(const at::Tensor& input, const at::Tensor& weight,
                         const std::optional<at::Tensor>& bias = {}, at::IntArrayRef stride = {},
                         at::IntArrayRef padding = {}, at::IntArrayRef dilation = {},
                         std::int64_t groups = 1, Again recompute = false, bool runs_again = false);

/// The transposed convolution; options as for conv.
BRIM_API at::Tensor conv_transpose(const at::Tensor& input, const at::Tensor& weight,
                                   const std::optional<at::Tensor>& bias = {},
                                   at::IntArrayRef stride = {}, at::IntArrayRef padding = {},
                                   at::IntArrayRef output_padding = {}, std::int64_t groups = 1,
                                   at::IntArrayRef dilation = {}, Again recompute = false,
                                   bool runs_again = false);

// -- Normalisation -----------------------------------------------------------------------------

/// With the running statistics (`training` false) the input is kept only where the weight needs a
/// gradient. `momentum` is what the caller worked out of torch's "None".
BRIM_API at::Tensor batch_norm(const at::Tensor& input,
                               const std::optional<at::Tensor>& running_mean,
                               const std::optional<at::Tensor>& running_var,
                               const std::optional<at::Tensor>& weight = {},
                               const std::optional<at::Tensor>& bias = {}, bool training = false,
                               double momentum = 0.1, double eps = 1e-5);

/// Over the last dimensions; keeps its input, and two numbers per row.
BRIM_API at::Tensor layer_norm(const at::Tensor& input, at::IntArrayRef normalized_shape,
                               const std::optional<at::Tensor>& weight = {},
                               const std::optional<at::Tensor>& bias = {}, double eps = 1e-5);

/// Over groups of channels; keeps its input, and two numbers per group.
BRIM_API at::Tensor group_norm(const at::Tensor& input, std::int64_t num_groups,
                               const std::optional<at::Tensor>& weight = {},
                               const std::optional<at::Tensor>& bias = {}, double eps = 1e-5);

/// @param eps nothing: the smallest step of the input's type above 1, as torch does
BRIM_API at::Tensor rms_norm(const at::Tensor& input, at::IntArrayRef normalized_shape,
                             const std::optional<at::Tensor>& weight = {},
                             std::optional<double> eps = {});

/// The RMS norm over the last dimension that frameworks write by hand: in float32, whatever the
/// input's type is. Keeps the input in its own type and one number per row.
///
///     h = input.float();  h = h * rsqrt(mean(h * h) + eps);
///     cast_first:  (offset + weight) * h.to(input.dtype)              Llama, Mistral, Qwen, T5
///     else:        (h * (offset + weight.float())).to(input.dtype)    Gemma, with offset 1
///
/// The result's type follows: with `cast_first`, that of a product of the input's and the weight's.
/// @param weight nothing: no product
/// @throws c10::ValueError for a weight of another shape than the input's last dimension, and for
///         a negative eps.
BRIM_API at::Tensor float32_rms_norm(const at::Tensor& input,
                                     const std::optional<at::Tensor>& weight, double eps,
                                     double offset = 0, bool cast_first = true);

// -- Pooling -----------------------------------------------------------------------------------

/// Pools the last one, two or three dimensions: as many as `kernel_size` has numbers. Keeps one
/// byte an output, the place in the window; for windows of more than 256 places, torch's own.
BRIM_API at::Tensor max_pool(const at::Tensor& input, at::IntArrayRef kernel_size,
                             at::IntArrayRef stride = {}, at::IntArrayRef padding = {},
                             at::IntArrayRef dilation = {}, bool ceil_mode = false);

/// The same with the indices of the maxima (int64), as torch gives them.
BRIM_API std::tuple<at::Tensor, at::Tensor> max_pool_with_indices(
    const at::Tensor& input, at::IntArrayRef kernel_size, at::IntArrayRef stride = {},
    at::IntArrayRef padding = {}, at::IntArrayRef dilation = {}, bool ceil_mode = false);

/// Keeps nothing.
BRIM_API at::Tensor avg_pool(const at::Tensor& input, at::IntArrayRef kernel_size,
                             at::IntArrayRef stride = {}, at::IntArrayRef padding = {},
                             bool ceil_mode = false, bool count_include_pad = true,
                             std::optional<std::int64_t> divisor_override = {});

/// Keeps nothing. Pools as many dimensions as `output_size` has numbers.
BRIM_API at::Tensor adaptive_avg_pool(const at::Tensor& input, at::IntArrayRef output_size);

}  // namespace brim::nn::functional
