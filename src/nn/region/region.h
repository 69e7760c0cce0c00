#pragma once

#include <ATen/core/Tensor.h>
#include <brim/nn/saving.h>
#include <c10/core/DispatchKey.h>

// How a region reaches torch's functions: by a dispatch key of torch that nothing else uses, above
// autograd and autocast. It is in force while a region is open. Operators without a kernel for it
// pass it at no cost.

namespace brim::nn {

/// DeferredInit belongs to torchdistx, which is no longer developed. torch may take it back
/// (pytorch pull request 166369 tried), and then this is the next one.
template <class Key>
[[nodiscard]] constexpr Key spare_key() {
  if constexpr (requires { Key::DeferredInit; }) {
    return Key::DeferredInit;
  } else {
    return Key::TESTING_ONLY_GenericMode;
  }
}

inline constexpr auto kRegionKey = spare_key<c10::DispatchKey>();

/// Registers what torch's operators are in a region (redirections.cpp); once, when the first one
/// begins.
void register_redirections();

/// Whether a region is open here, for a call that records a gradient: no tracer records it, and
/// nobody runs it again without the region.
/// @param input a tensor of the call
[[nodiscard]] bool is_redirected(const at::Tensor& input);

/// What the region computes again.
[[nodiscard]] Recompute recompute_here() noexcept;

}  // namespace brim::nn
