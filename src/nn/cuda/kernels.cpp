// Built into libbrim_cuda where there is a CUDA compiler. Registers its kernels for the operators
// of ops/ when it is loaded; where it is not, or has no kernel, ATen operators do the work. The
// loader finds libraries by name, so a second copy of libbrim loads no second copy of this one.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "nn/cuda/bits.h"
#include "nn/cuda/tensors.h"
#include "nn/ops/bits.h"

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

}  // namespace

TORCH_LIBRARY_IMPL(brim, CUDA, m) {
  m.impl("bitmask_pack", bitmask_pack_op);
  m.impl("bitmask_pack_", bitmask_pack_op_);
  m.impl("pack_bits", pack_bits_op);
  m.impl("apply_bits", apply_bits_op);
}

}  // namespace brim::nn::cuda
