#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "nn/autograd/autocast.h"

// Layers that torch runs in float32 under autocast, on some devices and in some versions: we ask
// torch's own operator of the same name where it has such a rule.

namespace brim::nn {

[[nodiscard]] inline bool torch_has_autocast(const char* aten_name, c10::DispatchKey key) {
  const auto op = c10::Dispatcher::singleton().findSchema({aten_name, ""});
  return op && op->hasKernelForDispatchKey(key);
}

}  // namespace brim::nn

/// Registers `layer##_autocast<device>` for each device where torch has a rule for aten::layer.
#define BRIM_AUTOCAST_AS_TORCH(layer)            \
  BRIM_AUTOCAST_ON(layer, AutocastCPU, at::kCPU) \
  BRIM_AUTOCAST_ON(layer, AutocastCUDA, at::kCUDA)

#define BRIM_AUTOCAST_ON(layer, key, device)                          \
  TORCH_LIBRARY_IMPL(brim, key, m) {                                  \
    if (torch_has_autocast("aten::" #layer, c10::DispatchKey::key)) { \
      m.impl(#layer, layer##_autocast<device>);                       \
    }                                                                 \
  }
