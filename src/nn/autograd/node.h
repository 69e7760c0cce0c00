#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cstdint>
#include <optional>

#include "compat.h"

// How the layers take part in autograd: one hand-written node a layer, because
// torch::autograd::Function costs more than a small layer itself.
//
// Layers talk to each other at forward through `grad_fn`. One that is about to keep its input tells
// the node that made it, which may then drop what it kept of its own (a ReLU its bits: the output
// says the same, and is there anyway). Or it keeps nothing and asks that node in backward to give
// the value again (see recompute.h). Neither is right if somebody wrote to the value in between
// without autograd's knowledge, so a node remembers what it made.

namespace brim::nn {

using compat::make_node;
using compat::NodePtr;
using compat::PtrTo;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

/// Which saved-tensor hooks are in force; null for none.
[[nodiscard]] const void* hooks_in_force();

/// Whether torch.compile, vmap or the like looks on, which have strides and memory of their own.
[[nodiscard]] bool is_traced(const at::Tensor& input);

/// A value at one moment: the memory that it is in, and how often that was written to.
struct TensorVersion {
  const void* memory = nullptr;
  std::uint32_t version = 0;

  bool operator==(const TensorVersion&) const = default;
};

[[nodiscard]] TensorVersion version_of(const at::Tensor& tensor);

class SavingNode : public Node {
 public:
  /// At the end of forward. Only what is set here is ever asked of this node.
  void set_output(const at::Tensor& output) {
    output_ = version_of(output);
    version_ = output.unsafeGetTensorImpl()->version_counter();
  }

  /// What this node made, as it was then.
  [[nodiscard]] const TensorVersion& output() const { return output_; }

  /// Elements of the output.
  [[nodiscard]] c10::SymInt elements() const;

  /// Whether nobody has written to the output up to now, autograd's own operators included.
  [[nodiscard]] bool is_untouched() const {
    return version_.enabled() && version_.current_version() == output_.version;
  }

  /// Whether layers that run now may talk to this one: not across the border of saved-tensor hooks.
  /// What a checkpointed region keeps must not depend on what came before it, which is another
  /// graph when the region runs again.
  [[nodiscard]] bool is_near() const { return hooks_ == hooks_in_force(); }

  /// A consumer keeps `output`, the value that this node made, for its own backward.
  virtual void output_is_kept(const at::Tensor& output) { (void)output; }

  /// How many layers in a row must run again until recompute() has this node's output, from what is
  /// kept anyway; nothing where it cannot be given. Asked at forward.
  virtual std::optional<int> layers_to_recompute() const { return std::nullopt; }

  /// Told at forward, before recompute() is relied on: what that reads again must not change with
  /// what others do to weights, biases and statistics until then.
  /// @returns false where they were changed already
  [[nodiscard]] virtual bool prepare_to_recompute() { return true; }

  /// The output again, bit for bit. Asked during backward, before this node itself runs.
  virtual at::Tensor recompute();

  /// relu(output + added) in one go, or nothing where recompute() and torch's operators must do.
  /// @param added undefined: nothing is added
  virtual std::optional<at::Tensor> recompute_relu(const at::Tensor& added) {
    (void)added;
    return std::nullopt;
  }

 private:
  const void* hooks_ = hooks_in_force();
  TensorVersion output_;
  c10::VariableVersion version_;
};

/// The same values, for a place in the graph of their own. What torch.func.grad takes further out
/// keeps its place there, which detach() would lose.
[[nodiscard]] at::Tensor without_history(const at::Tensor& tensor);

/// Tells the layer that made `input`, if it is one of ours, that its output is kept.
void tell_producer_kept(const at::Tensor& input);

/// In double backward: the gradient of a function whose second derivative is zero, as a part of the
/// graph that leads to the function's own input, as torch's is. Outside of it `grad` as it is.
/// @param zeros whether torch's derivative gives the input zeros, or nothing
[[nodiscard]] at::Tensor tied_to(const torch::autograd::Edge& input, const at::Tensor& grad,
                                 bool zeros = true);

/// Whether any of them needs a gradient now.
template <class... Tensors>
[[nodiscard]] bool needs_grad(const Tensors&... tensors) {
  return torch::autograd::compute_requires_grad(tensors...);
}

/// For the parts of a backward: forward-mode gradients would be dropped in silence.
/// @throws c10::NotImplementedError naming the layer.
void refuse_forward_ad(const char* layer, const at::Tensor& grad);

/// What kernels below autograd run under.
using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

}  // namespace brim::nn
