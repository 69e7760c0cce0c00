#include "nn/autograd/known.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <brim/nn/subclasses.h>
#include <torch/library.h>

#include <atomic>

namespace brim::nn {
namespace {

std::atomic<bool (*)(const at::Tensor&)> rule = nullptr;

/// As on the CPU: the kernel that calls torch's operators.
void run_torchs(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/,
                torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

}  // namespace

void set_subclass_rule(bool (*is_known)(const at::Tensor&)) { rule = is_known; }

bool is_known_otherwise(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kInTransforms =
      kKnownKeys | c10::DispatchKeySet(c10::DispatchKey::FuncTorchGradWrapper);
  const c10::DispatchKeySet keys = tensor.key_set();
  const auto asked = rule.load();
  return (keys.has(c10::DispatchKey::Python) || (keys | kInTransforms) == kInTransforms) &&
         asked != nullptr && asked(tensor);
}

// Below autograd a kernel for all backends serves all of them but nested tensors.
TORCH_LIBRARY_IMPL(brim, CompositeImplicitAutogradNestedTensor, m) {
  for (const char* const name :
       {"batch_norm", "layer_norm", "group_norm", "rms_norm", "max_pool", "max_pool_with_indices",
        "avg_pool", "adaptive_avg_pool"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_torchs>());
  }
}

}  // namespace brim::nn
