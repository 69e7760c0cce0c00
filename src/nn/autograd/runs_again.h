#pragma once

#include <ATen/core/Tensor.h>

namespace brim::nn {

/// The node of a layer whose recompute() takes long: a matrix product. So layers do not ask it for
/// their input (see recompute.h). The loss does: its input, the logits, is by far the largest value
/// of a language model.
class RunsAgain {
 public:
  virtual ~RunsAgain() = default;

  /// Called at forward, before recompute() is relied on: from here on, changes to the layer's
  /// parameters do not affect it or raise autograd's error. What recompute() gives is in memory
  /// that nobody else uses. @returns false if it cannot run again
  [[nodiscard]] virtual bool prepare_to_run_again() = 0;
};

/// The layer of this kind that made a value, through views and at most one copy: recompute() of the
/// value's own node runs it again. Null if there is none, or somebody wrote to the value on its
/// way.
[[nodiscard]] RunsAgain* maker_that_runs_again(const at::Tensor& value);

}  // namespace brim::nn
