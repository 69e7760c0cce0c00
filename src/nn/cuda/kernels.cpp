// Built into libbrim_cuda where there is a CUDA compiler. Registers its kernels for the operators
// of ops/ when it is loaded; where it is not, or has no kernel, ATen operators do the work. The
// loader finds libraries by name, so a second copy of libbrim loads no second copy of this one.
#include <torch/library.h>

#include "nn/cuda/bits.h"
#include "nn/cuda/tensors.h"
#include "nn/ops/bits.h"

namespace brim::nn::cuda {
namespace {

void bitmask_pack_tensor(const at::Tensor& input, const at::Tensor& output, const at::Tensor& bits,
                         std::string_view name, double a, double b) {
  const Number type = number_of(input, "brim::bitmask_pack");
  launch_on(input, [&](cudaStream_t stream) {
    bitmask_pack(type, input.const_data_ptr(), output.mutable_data_ptr(),
                 bits.mutable_data_ptr<std::uint8_t>(), input.numel(), name, a, b, stream);
  });
}

void pack_bits_tensor(const at::Tensor& mask, const at::Tensor& bits) {
  const bool bytes = mask.scalar_type() == at::kBool || mask.scalar_type() == at::kByte;
  const Number type = bytes ? Number::byte : number_of(mask, "brim::pack_bits");
  launch_on(mask, [&](cudaStream_t stream) {
    pack_bits(type, mask.const_data_ptr(), bits.mutable_data_ptr<std::uint8_t>(), mask.numel(),
              stream);
  });
}

void apply_bits_tensor(const at::Tensor& input, const at::Tensor& bits, const at::Tensor& output,
                       double on, double off) {
  const Number type = number_of(input, "brim::apply_bits");
  launch_on(input, [&](cudaStream_t stream) {
    apply_bits(type, input.const_data_ptr(), bits.const_data_ptr<std::uint8_t>(),
               output.mutable_data_ptr(), input.numel(), on, off, stream);
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(brim, CUDA, m) {
  m.impl("bitmask_pack", bitmask_pack_with<bitmask_pack_tensor>);
  m.impl("bitmask_pack_", bitmask_pack_with_<bitmask_pack_tensor>);
  m.impl("pack_bits", pack_bits_with<pack_bits_tensor>);
  m.impl("apply_bits", apply_bits_with<apply_bits_tensor>);
}

}  // namespace brim::nn::cuda
