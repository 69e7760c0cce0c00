#pragma once

#include <cstdint>

namespace brim::nn {

/// Values are part of the operators' schema: do not reorder.
enum class Gate : std::int64_t {
  kRelu = 0,       // no parameter
  kHardtanh = 1,   // a: lower, b: upper bound
  kLeakyRelu = 2,  // a: slope below zero
};

}  // namespace brim::nn
