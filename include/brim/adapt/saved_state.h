#pragma once

#include <ATen/core/Tensor.h>
#include <brim/export.h>

#include <functional>
#include <type_traits>
#include <unordered_map>
#include <vector>

namespace brim {

/// What an attempt may change, as it was before it, so that a failed attempt can be undone exactly:
/// half a backward pass in the gradients, running statistics, half a step of an optimizer.
///
/// An adaptive call makes one before its first attempt (`range` and `chunked`: before each part),
/// lets AdaptOptions::restore add to it, and puts everything back after each attempt that ran out
/// of memory. Use `restoring` for tensors and modules, and a function of one's own for the rest:
///
///     brim::batch(512, step, {.restore = brim::restoring(model, counts)});
///
/// Adding copies what is there, on its device, because a failure can come at any time: with
/// gradients that are none, a module costs its buffers. The copies are released when the call ends.
class BRIM_API SavedState {
 public:
  SavedState() = default;
  SavedState(const SavedState&) = delete;
  SavedState& operator=(const SavedState&) = delete;

  /// Values, gradient, and whether it requires one. What was added already is not copied twice.
  void add(const at::Tensor& tensor);
  void add_values(const at::Tensor& tensor);
  /// And whether it requires one. Where there is none, none is put back, and nothing is copied.
  void add_gradient(const at::Tensor& tensor);

  /// Called after the tensors have been put back, as often as an attempt fails.
  void add(std::function<void()> put_back);

  /// Leaves version counters as they are, and autograd's graph, unless an attempt wrote to a
  /// tensor that required no gradient something that does.
  void put_back() const;

  /// Whether the values of this tensor, or of one that shares its memory, are put back.
  [[nodiscard]] bool has_values(const at::Tensor& tensor) const;

 private:
  struct Saved {
    at::Tensor tensor;
    at::Tensor before;  // its memory, or its gradient: an attempt may have given it another
    at::Tensor copy;    // of `before`
    bool required;      // a gradient
  };

  std::unordered_map<const c10::TensorImpl*, Saved> values_;
  std::unordered_map<const c10::TensorImpl*, Saved> gradients_;
  std::vector<std::function<void()>> others_;
};

namespace detail {

/// A tensor: values and gradient. A module or its holder: gradients of its parameters, with whether
/// they require them, and values of its buffers. Anything else: `thing(state)`.
template <class Thing>
void add_to(SavedState& state, Thing& thing) {
  if constexpr (std::is_convertible_v<const Thing&, const at::Tensor&>) {
    state.add(thing);
  } else if constexpr (requires { thing.buffers(); }) {
    for (const at::Tensor& parameter : thing.parameters()) {
      state.add_gradient(parameter);
    }
    for (const at::Tensor& buffer : thing.buffers()) {
      state.add_values(buffer);
    }
  } else if constexpr (requires { thing->buffers(); }) {
    add_to(state, *thing);
  } else {
    thing(state);
  }
}

}  // namespace detail

/// For AdaptOptions::restore: tensors (values and gradient), modules (gradients of the parameters,
/// values of the buffers; of all whether they require a gradient) and functions of a SavedState.
/// Refers to them: they must outlive the call.
///
/// A module's parameters themselves are not copied: an optimizer changes them, and
/// RestoredOptimizer (brim/adapt/restore_optimizer.h) adds what it changes.
template <class... Things>
std::function<void(SavedState&)> restoring(Things&... things) {
  return [&things...](SavedState& state) { (detail::add_to(state, things), ...); };
}

}  // namespace brim
