#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
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
  if (name == "relu") {
    return BitmaskKind::relu;
  }
  if (name == "hardtanh") {
    return BitmaskKind::hardtanh;
  }
  if (name == "leaky_relu") {
    return BitmaskKind::leaky_relu;
  }
  if (name == "hardsigmoid") {
    return BitmaskKind::hardsigmoid;
  }
  throw std::invalid_argument("unknown bitmask activation: " + std::string(name));
}

}  // namespace brim::nn
