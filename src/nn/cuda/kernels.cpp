// Built into libbrim_cuda where there is a CUDA compiler. Registers its kernels for the operators
// of ops/ when it is loaded; where it is not, or has no kernel, ATen operators do the work. The
// loader finds libraries by name, so a second copy of libbrim loads no second copy of this one.
#include "nn/ops/cuda_kernels.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <torch/library.h>

#include "nn/cuda/batch_norm.h"
#include "nn/cuda/bits.h"
#include "nn/cuda/norm.h"
#include "nn/cuda/pool.h"
#include "nn/cuda/tensors.h"
#include "nn/ops/bits.h"
#include "nn/ops/channels.h"

namespace brim::nn::cuda {
namespace {

void bitmask_pack_into(const at::Tensor& input, const at::Tensor& output, const at::Tensor& bits,
                       std::string_view name, double a, double b) {
  const Number type = number_of(input, "brim::bitmask_pack");
  launch_on(input, [&](cudaStream_t stream) {
    bitmask_pack(type, input.const_data_ptr(), output.mutable_data_ptr(),
                 bits.mutable_data_ptr<std::uint8_t>(), input.numel(), bitmask_kind(name), a, b,
                 stream);
  });
}

std::tuple<at::Tensor, at::Tensor> bitmask_pack_op(const at::Tensor& input, std::string_view name,
                                                   double a, double b) {
  const at::Tensor source = dense(input);
  std::tuple<at::Tensor, at::Tensor> result{at::empty_like(source), empty_bits(source)};
  bitmask_pack_into(source, std::get<0>(result), std::get<1>(result), name, a, b);
  return result;
}

at::Tensor bitmask_pack_op_(at::Tensor& input, std::string_view name, double a, double b) {
  at::Tensor bits = empty_bits(input);
  bitmask_pack_into(input, input, bits, name, a, b);
  return bits;
}

at::Tensor pack_bits_op(const at::Tensor& mask) {
  const bool bytes = mask.scalar_type() == at::kBool || mask.scalar_type() == at::kByte;
  const Number type = bytes ? Number::byte : number_of(mask, "brim::pack_bits");
  at::Tensor bits = empty_bits(mask);
  launch_on(mask, [&](cudaStream_t stream) {
    pack_bits(type, mask.const_data_ptr(), bits.mutable_data_ptr<std::uint8_t>(), mask.numel(),
              stream);
  });
  return bits;
}

at::Tensor apply_bits_op(const at::Tensor& input, const at::Tensor& bits,
                         c10::SymIntArrayRef strides, double on, double off) {
  const Number type = number_of(input, "brim::apply_bits");
  const at::Tensor source = with_strides(input, C10_AS_INTARRAYREF_SLOW(strides));
  at::Tensor output = at::empty_like(source);
  launch_on(source, [&](cudaStream_t stream) {
    apply_bits(type, source.const_data_ptr(), bits.const_data_ptr<std::uint8_t>(),
               output.mutable_data_ptr(), source.numel(), on, off, stream);
  });
  return output;
}

void scale_channels_entry(const at::Tensor& grad, const at::Tensor& weight,
                          const at::Tensor& running_var, double eps, at::Tensor& output,
                          const ChannelBlocks& blocks) {
  const Number type = number_of(grad, "brim::scale_channels");
  const Number params = number_of(running_var, "brim::scale_channels");
  launch_on(grad, [&](cudaStream_t stream) {
    scale_channels(type, params, grad.const_data_ptr(),
                   weight.defined() ? weight.const_data_ptr() : nullptr,
                   running_var.const_data_ptr(), eps, output.mutable_data_ptr(), blocks, stream);
  });
}

ChannelNorm channel_norm(const NormOf& norm) {
  const auto data = [](const MaybeTensor& tensor) {
    return is_given(tensor) ? tensor->const_data_ptr() : nullptr;
  };
  return {number_of(norm.mean, "brim::batch_norm"),
          data(norm.weight),
          data(norm.bias),
          norm.mean.const_data_ptr(),
          norm.spread.const_data_ptr(),
          norm.eps};
}

void normalise_entry(const NormOf& norm, std::int64_t formula, const at::Tensor& added, bool relu,
                     at::Tensor& output) {
  const Number type = number_of(norm.input, "brim::batch_norm");
  launch_on(norm.input, [&](cudaStream_t stream) {
    normalise(type, formula, channel_norm(norm), norm.input.const_data_ptr(),
              added.defined() ? added.const_data_ptr() : nullptr, relu, output.mutable_data_ptr(),
              blocks_of(norm.input), stream);
  });
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> normalise_backward_entry(const NormOf& norm,
                                                                        const at::Tensor& grad,
                                                                        bool input_grad) {
  const at::Tensor& input = norm.input;
  const Number type = number_of(input, "brim::batch_norm");
  const ChannelBlocks blocks = blocks_of(input);
  const auto sums_as = input.options().dtype(type == Number::float64 ? at::kDouble : at::kFloat);
  at::Tensor sums = at::empty({parts_of(blocks), blocks.channels, 2}, sums_as);
  const at::Tensor grads = at::empty({2, blocks.channels}, sums_as);
  at::Tensor grad_input = input_grad ? at::empty_like(input) : at::Tensor();
  at::Tensor grad_weight = grads.select(0, 0);
  at::Tensor grad_bias = grads.select(0, 1);
  launch_on(input, [&](cudaStream_t stream) {
    normalise_backward(
        type, channel_norm(norm), grad.const_data_ptr(), input.const_data_ptr(),
        sums.mutable_data_ptr(), input_grad ? grad_input.mutable_data_ptr() : nullptr,
        grad_weight.mutable_data_ptr(), grad_bias.mutable_data_ptr(), blocks, stream);
  });
  const auto params = norm.mean.scalar_type();
  return {grad_input, grad_weight.to(params), grad_bias.to(params)};
}

bool is_capturing_entry() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

void max_pool_pack_entry(const at::Tensor& input, at::Tensor& output, at::Tensor& offsets,
                         const PoolGeometry& geometry) {
  const Number type = number_of(input, "brim::max_pool_pack");
  launch_on(input, [&](cudaStream_t stream) {
    max_pool_pack(type, input.const_data_ptr(), output.mutable_data_ptr(),
                  offsets.mutable_data_ptr<std::uint8_t>(), geometry, stream);
  });
}

void max_pool_scatter_entry(const at::Tensor& grad, const at::Tensor& offsets,
                            at::Tensor& grad_input, const PoolGeometry& geometry) {
  const Number type = number_of(grad, "brim::max_pool_scatter");
  launch_on(grad, [&](cudaStream_t stream) {
    max_pool_scatter(type, grad.const_data_ptr(), offsets.const_data_ptr<std::uint8_t>(),
                     grad_input.mutable_data_ptr(), geometry, stream);
  });
}

void max_pool_indices_entry(const at::Tensor& offsets, at::Tensor& indices,
                            const PoolGeometry& geometry) {
  launch_on(offsets, [&](cudaStream_t stream) {
    max_pool_indices(offsets.const_data_ptr<std::uint8_t>(),
                     indices.mutable_data_ptr<std::int64_t>(), geometry, stream);
  });
}

void avg_pool_backward_entry(const at::Tensor& grad, at::Tensor& grad_input,
                             const PoolGeometry& geometry, const AvgRule& rule) {
  const Number type = number_of(grad, "brim::avg_pool_backward");
  launch_on(grad_input, [&](cudaStream_t stream) {
    avg_pool_backward(type, grad.const_data_ptr(), grad_input.mutable_data_ptr(), geometry, rule,
                      stream);
  });
}

/// What is left out stays null: ATen operators do its work.
constexpr CudaKernels kKernels{
    .max_pool_pack = max_pool_pack_entry,
    .max_pool_scatter = max_pool_scatter_entry,
    .max_pool_indices = max_pool_indices_entry,
    .avg_pool_backward = avg_pool_backward_entry,
    .scale_channels = scale_channels_entry,
    .normalise = normalise_entry,
    .normalise_backward = normalise_backward_entry,
    .is_capturing = is_capturing_entry,
};

[[maybe_unused]] const bool kRegistered = [] {
  register_cuda_kernels(kKernels);
  return true;
}();

}  // namespace

TORCH_LIBRARY_IMPL(brim, CUDA, m) {
  m.impl("bitmask_pack", bitmask_pack_op);
  m.impl("bitmask_pack_", bitmask_pack_op_);
  m.impl("pack_bits", pack_bits_op);
  m.impl("apply_bits", apply_bits_op);
}

}  // namespace brim::nn::cuda
