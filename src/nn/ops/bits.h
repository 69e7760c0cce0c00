#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

#include <cstdint>
#include <string_view>
#include <tuple>

// One bit per element, eight to a byte (uint8), the first element in the lowest bit. Bits follow
// the order of the elements in memory, so whoever reads them needs the strides of the tensor that
// they were made for; a tensor with other strides is brought to these first.

namespace brim::nn {

/// Bytes for the bits of `elements` elements.
template <class Int>
[[nodiscard]] Int bit_bytes(const Int& elements) {
  return (elements + 7) / 8;
}

/// Memory for the bits of a tensor.
[[nodiscard]] inline at::Tensor empty_bits(const at::Tensor& of) {
  return of.new_empty_symint({bit_bytes(of.sym_numel())}, of.options().dtype(at::kByte));
}

/// `input * on` where the bit is set, else `input * off`. Where a factor is 0 the result is 0, also
/// for inf and NaN; where it is 1 the value is untouched.
/// @param strides of the tensor that the bits were made for (its sizes are input's).
at::Tensor apply_bits(const at::Tensor& input, const at::Tensor& bits, c10::SymIntArrayRef strides,
                      double on, double off);

/// Bits of what is not zero, in memory order. `mask`: bool, uint8 or floating, dense.
at::Tensor pack_bits(const at::Tensor& mask);

/// `result`, or the same with the strides that torch's elementwise operators give theirs, out of
/// two tensors of its sizes with these strides: a copy, or its memory where only dimensions of size
/// 1 have another stride.
at::Tensor as_elementwise(const at::Tensor& result, c10::SymIntArrayRef first,
                          c10::SymIntArrayRef second);

/// `input` itself if its elements fill a block of memory without gaps, else a copy that does, with
/// the strides that torch's elementwise operators give their output.
[[nodiscard]] inline at::Tensor dense(const at::Tensor& input) {
  if (input.is_non_overlapping_and_dense()) {
    return input;
  }
  return input.unsafeGetTensorImpl()->has_symbolic_sizes_strides()
             ? input.contiguous()
             : input.clone(at::MemoryFormat::Preserve);
}

/// `input` with these strides: itself or a copy.
[[nodiscard]] inline at::Tensor with_strides(const at::Tensor& input, at::IntArrayRef strides) {
  return input.strides() == strides ? input
                                    : input.new_empty_strided(input.sizes(), strides).copy_(input);
}

// On each device the operators are these functions around its kernel, which gets dense tensors.

/// @tparam Kernel (mask, bits)
template <auto Kernel>
at::Tensor pack_bits_with(const at::Tensor& mask) {
  at::Tensor bits = empty_bits(mask);
  Kernel(mask, bits);
  return bits;
}

/// @tparam Kernel (input, bits, output, on, off)
template <auto Kernel>
at::Tensor apply_bits_with(const at::Tensor& input, const at::Tensor& bits,
                           c10::SymIntArrayRef strides, double on, double off) {
  const at::Tensor source = with_strides(input, C10_AS_INTARRAYREF_SLOW(strides));
  at::Tensor output = at::empty_like(source);
  Kernel(source, bits, output, on, off);
  return output;
}

/// @tparam Kernel (input, output, bits, name, a, b), where output may be input
template <auto Kernel>
std::tuple<at::Tensor, at::Tensor> bitmask_pack_with(const at::Tensor& input, std::string_view name,
                                                     double a, double b) {
  const at::Tensor source = dense(input);
  std::tuple<at::Tensor, at::Tensor> result{at::empty_like(source), empty_bits(source)};
  Kernel(source, std::get<0>(result), std::get<1>(result), name, a, b);
  return result;
}

template <auto Kernel>
at::Tensor bitmask_pack_with_(at::Tensor& input, std::string_view name, double a, double b) {
  at::Tensor bits = empty_bits(input);
  Kernel(input, input, bits, name, a, b);
  return bits;
}

}  // namespace brim::nn
