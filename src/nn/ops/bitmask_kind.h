#pragma once

#include <cstdint>
#include <string_view>

namespace brim::nn {

/// The activations for which kernels write the value and the bits in one pass.
enum class BitmaskKind : std::uint8_t {
  relu,
  hardtanh,    // a: lower, b: upper bound
  leaky_relu,  // a: slope below zero
  hardsigmoid,
};

/// @param name of one of them, as in the operators' schema
constexpr BitmaskKind bitmask_kind(std::string_view name) {
  return name == "relu"         ? BitmaskKind::relu
         : name == "hardtanh"   ? BitmaskKind::hardtanh
         : name == "leaky_relu" ? BitmaskKind::leaky_relu
                                : BitmaskKind::hardsigmoid;
}

}  // namespace brim::nn
