#pragma once

#include <ATen/core/Tensor.h>

namespace brim::nn {

/// The node of a layer that can compute its output again, but takes long to: a matrix product. So
/// layers do not ask it for their input (see recompute.h). The loss does: its input, the logits, is
/// by far the largest value of a language model.
class RunsAgain {
 public:
  virtual ~RunsAgain() = default;

  /// Called at forward, before run_again() is relied on: from here on, changes to the layer's
  /// parameters do not affect it or raise autograd's error. @returns false if it cannot run again
  [[nodiscard]] virtual bool prepare_to_run_again() = 0;

  /// The same output, bit for bit, in memory that nobody else uses. Called during backward, before
  /// the node itself runs. Under grad mode (double backward) the result is part of the graph.
  [[nodiscard]] virtual at::Tensor run_again() = 0;
};

}  // namespace brim::nn
