#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randn_like.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

// What the tests of bits, bitmask activations and dropout share.

namespace brim::tests {

inline constexpr std::array<at::ScalarType, 4> kFloatingTypes{at::kFloat, at::kDouble, at::kHalf,
                                                              at::kBFloat16};

/// An operator of ours, by its schema's name.
template <class Signature>
auto operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

inline at::Tensor normal_numbers(at::IntArrayRef sizes, at::ScalarType type) {
  return at::randn(sizes, at::TensorOptions().dtype(at::kFloat)).to(type);
}

/// The same number everywhere; NaN counts as the same as NaN.
inline bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         at::allclose(a, b, 0, 0, /*equal_nan=*/true);
}

struct Layout {
  std::string name;
  at::Tensor tensor;
};

/// The same kind of numbers laid out in memory in every way that matters to bits.
inline std::vector<Layout> layouts(at::ScalarType type) {
  const at::Tensor plain = normal_numbers({3, 5, 6, 7}, type);
  return {
      {"contiguous", plain},
      {"channels_last", plain.contiguous(at::MemoryFormat::ChannelsLast)},
      {"permuted", plain.permute({2, 0, 3, 1})},
      {"every second", normal_numbers({3, 5, 6, 14}, type).slice(3, 0, 14, 2)},
      {"narrowed", normal_numbers({3, 5, 9, 7}, type).narrow(2, 1, 6)},
      {"expanded", normal_numbers({3, 1, 6, 7}, type).expand({3, 5, 6, 7})},
      {"one number", normal_numbers({}, type)},
      {"empty", normal_numbers({3, 0, 7}, type)},
  };
}

}  // namespace brim::tests
