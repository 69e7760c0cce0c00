#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

namespace brim::nn {

/// An activation by name: torch's own, or one that models write out in Python, operator by operator
/// as they do.
struct Elementwise {
  std::string_view name;
  at::Tensor (*value)(const at::Tensor& x);
  /// The gradient of x, by the operators that autograd would call, in the same order. Null: by
  /// running `value` again with autograd.
  /// @param y if not null, set to value(x): the two often share what is expensive
  at::Tensor (*grad)(const at::Tensor& grad, const at::Tensor& x, at::Tensor* y) = nullptr;
  /// What is in one kernel of ours on CUDA (cuda/activations.cuh): its product with another tensor,
  /// or also the activation alone, if it is several operators of ATen's.
  enum class Fused : std::uint8_t { nothing, as_gate, alone_too };
  Fused fused = Fused::nothing;
  bool powers = false;  // has powers: autocast runs these and what follows in float32 on CUDA
};

/// @throws c10::ValueError if there is none of this name, with those that there are.
[[nodiscard]] const Elementwise& elementwise(std::string_view name);

}  // namespace brim::nn
