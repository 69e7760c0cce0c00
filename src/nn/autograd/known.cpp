#include "nn/autograd/known.h"

#include <brim/nn/subclasses.h>

#include <atomic>

namespace brim::nn {
namespace {

std::atomic<bool (*)(const at::Tensor&)> rule = nullptr;
std::atomic<bool (*)()> compiling = nullptr;

}  // namespace

void set_subclass_rule(bool (*is_known)(const at::Tensor&), bool (*is_compiling)()) {
  rule = is_known;
  compiling = is_compiling;
}

bool is_compiled(const at::Tensor& tensor) {
  const auto asked = compiling.load();
  return tensor.key_set().has(c10::DispatchKey::Python) && asked != nullptr && asked();
}

bool is_known_otherwise(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kInTransforms =
      kKnownKeys | c10::DispatchKeySet(c10::DispatchKey::FuncTorchGradWrapper);
  const c10::DispatchKeySet keys = tensor.key_set();
  const auto asked = rule.load();
  return (keys.has(c10::DispatchKey::Python) || (keys | kInTransforms) == kInTransforms) &&
         asked != nullptr && asked(tensor);
}

}  // namespace brim::nn
