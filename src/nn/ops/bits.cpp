#include "nn/ops/bits.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bitwise_left_shift.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mul_meta_dispatch.h>
#include <ATen/ops/where.h>
#include <c10/util/strides.h>

#include "nn/autograd/linear_history.h"
#include "nn/autograd/operator.h"
#include "nn/cpu/bits.h"

namespace brim::nn {
namespace {

/// Elements in the order of memory, as one dimension. `dense` only.
at::Tensor in_memory_order(const at::Tensor& dense) {
  return dense.as_strided({dense.numel()}, {1});
}

/// With ATen operators alone: any device.
at::Tensor pack_bits_anywhere(const at::Tensor& mask) {
  const at::Tensor flags = in_memory_order(mask).ne(0).to(at::kByte);
  const std::int64_t bytes = bit_bytes(flags.numel());
  const at::Tensor padded = at::constant_pad_nd(flags, {0, bytes * 8 - flags.numel()});
  const at::Tensor places = at::arange(8, padded.options());
  return at::bitwise_left_shift(padded.view({bytes, 8}), places).sum(1, false, at::kByte);
}

/// Whether these are the strides of a new tensor, also in dimensions of size 1: what torch gives
/// out of tensors that have them.
bool are_plain(at::IntArrayRef sizes, at::IntArrayRef strides) {
  const auto are = [&](const auto& others) { return strides == at::IntArrayRef(others); };
  return are(c10::contiguous_strides(sizes)) ||
         (sizes.size() == 4 && are(c10::get_channels_last_strides_2d(sizes)));
}

/// Whether both are the same places in memory.
bool are_alike(at::IntArrayRef sizes, at::IntArrayRef one, at::IntArrayRef other) {
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != 1 && one[i] != other[i]) {
      return false;
    }
  }
  return true;
}

at::Tensor scaled(const at::Tensor& input, double factor) {
  return factor == 0.0 ? input.new_zeros({}) : factor == 1.0 ? input : input.mul(factor);
}

at::Tensor apply_bits_anywhere(const at::Tensor& input, const at::Tensor& bits,
                               c10::SymIntArrayRef strides, double on, double off) {
  const at::Tensor source = with_strides(input, C10_AS_INTARRAYREF_SLOW(strides));
  const at::Tensor values = in_memory_order(source);
  const at::Tensor places = at::arange(8, bits.options());
  const at::Tensor flags = bits.unsqueeze(1)
                               .bitwise_right_shift(places)
                               .bitwise_and(1)
                               .view({-1})
                               .narrow(0, 0, values.numel())
                               .to(at::kBool);
  const at::Tensor result = at::where(flags, scaled(values, on), scaled(values, off));
  return result.as_strided(source.sizes(), source.strides());
}

at::Tensor apply_bits_meta(const at::Tensor& input, const at::Tensor&, c10::SymIntArrayRef strides,
                           double, double) {
  return at::empty_strided_symint(input.sym_sizes(), strides, input.options());
}

/// Linear in its input, so its derivative is itself.
at::Tensor apply_bits_autograd(const at::Tensor& input, const at::Tensor& bits,
                               c10::SymIntArrayRef strides, double on, double off) {
  refuse_forward_ad("apply_bits", input);
  at::Tensor output = below_autograd([&] { return apply_bits(input, bits, strides, on, off); });
  if (needs_grad(input)) {
    set_linear_history(
        output, input, "brim::ApplyBitsBackward", false,
        [=, like = c10::SymDimVector(strides)](const at::Tensor& grad, const at::Tensor& kept) {
          return apply_bits(grad, kept, like, on, off);
        },
        bits);
  }
  return output;
}

const Operator<pack_bits_anywhere> kPackBits("pack_bits(Tensor mask) -> Tensor",
                                             {.cpu = pack_bits_with<cpu::pack_bits>,
                                              .meta = empty_bits},
                                             {at::Tag::needs_fixed_stride_order});
const Operator<apply_bits_anywhere> kApplyBits(
    "apply_bits(Tensor input, Tensor bits, SymInt[] strides, float on, float off) -> Tensor",
    {.cpu = apply_bits_with<cpu::apply_bits>,
     .meta = apply_bits_meta,
     .autograd = apply_bits_autograd},
    {at::Tag::needs_fixed_stride_order});

}  // namespace

at::Tensor apply_bits(const at::Tensor& input, const at::Tensor& bits, c10::SymIntArrayRef strides,
                      double on, double off) {
  return kApplyBits(input, bits, strides, on, off);
}

at::Tensor pack_bits(const at::Tensor& mask) { return kPackBits(mask); }

at::Tensor as_elementwise(const at::Tensor& result, c10::SymIntArrayRef first,
                          c10::SymIntArrayRef second) {
  if (is_traced(result) || (first == second && result.sym_strides() == first &&
                            are_plain(result.sizes(), result.strides()))) {
    return result;
  }
  const auto form = [&](c10::SymIntArrayRef strides) {
    return at::Tensor(at::detail::empty_strided_meta(
        result.sizes(), C10_AS_INTARRAYREF_SLOW(strides), result.scalar_type()));
  };
  // The kernel itself. Through the dispatcher it would be a Python function of torch._refs, which
  // takes 300 us instead of 3, and whose strides are not always those of the kernels.
  const at::Tensor torchs = at::meta::mul(form(first), form(second));
  if (torchs.strides() == result.strides()) {
    return result;
  }
  // Both are part of the graph in double backward.
  if (are_alike(result.sizes(), torchs.strides(), result.strides())) {
    return result.as_strided(result.sizes(), torchs.strides());
  }
  return at::empty_strided(result.sizes(), torchs.strides(), result.options()).copy_(result);
}

}  // namespace brim::nn
