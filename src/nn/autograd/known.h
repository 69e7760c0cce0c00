#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>

#include <optional>

// A layer never fails where torch's works: for tensors that brim's kernels do not know, torch's own
// operator runs.

namespace brim::nn {

/// Dense tensors on the CPU, on CUDA and without memory (meta). Not known: nested, sparse,
/// quantized and mkldnn tensors, lazy negation, other devices.
inline constexpr c10::DispatchKeySet kKnownKeys =
    c10::DispatchKeySet({c10::BackendComponent::CPUBit, c10::BackendComponent::CUDABit,
                         c10::BackendComponent::MetaBit}) |
    c10::DispatchKeySet({c10::DispatchKey::Dense, c10::DispatchKey::ADInplaceOrView,
                         c10::DispatchKey::Functionalize}) |
    c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset;

/// For tensors with other keys: asks the rule of brim/nn/subclasses.h.
[[nodiscard]] bool is_known_otherwise(const at::Tensor& tensor);

/// Whether a compiler traces this tensor.
[[nodiscard]] bool is_compiled(const at::Tensor& tensor);

[[nodiscard]] inline bool is_known_type(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16;
}

[[nodiscard]] inline bool is_known(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return true;
  }
  const c10::DispatchKeySet keys = tensor.key_set();
  return is_known_type(tensor.scalar_type()) &&
         ((keys | kKnownKeys) == kKnownKeys || is_known_otherwise(tensor)) &&
         !tensor._fw_grad(/*level=*/0).defined();  // brim has no forward-mode derivatives
}

[[nodiscard]] inline bool is_known(const std::optional<at::Tensor>& tensor) {
  return !tensor || is_known(*tensor);
}

/// Options are always known.
template <class Option>
[[nodiscard]] constexpr bool is_known(const Option& /*option*/) {
  return true;
}

template <auto Ours, auto Torchs>
struct WithFallback;

template <class Result, class... Args, Result (*Ours)(Args...), Result (*Torchs)(Args...)>
struct WithFallback<Ours, Torchs> {
  static Result call(Args... args) {
    return (is_known(args) && ...) ? Ours(args...) : Torchs(args...);
  }
};

/// The kernel that runs `Ours` for tensors that brim knows, else `Torchs`.
///
///     m.impl("linear", kWithFallback<linear_autograd, torch_linear>);
template <auto Ours, auto Torchs>
inline constexpr auto* kWithFallback = &WithFallback<Ours, Torchs>::call;

}  // namespace brim::nn
