#pragma once

#include <cstdint>

namespace brim::nn {

/// Values are part of the operators' schema: do not reorder.
enum class Gate : std::int64_t {
  relu = 0,        // no parameter
  hardtanh = 1,    // a: lower, b: upper bound
  leaky_relu = 2,  // a: slope below zero
};

}  // namespace brim::nn
