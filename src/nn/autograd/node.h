#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <brim/export.h>
#include <brim/nn/again.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cstdint>
#include <mutex>
#include <optional>

#include "compat.h"

// How the layers take part in autograd: each has a hand-written node, because
// torch::autograd::Function costs more than a small layer itself.
//
// Layers communicate at forward through `grad_fn`. A layer that is about to keep its input tells
// the node that made it, which may then drop what it kept itself (a ReLU its bits: the output holds
// the same information). Or it keeps nothing and asks that node in backward to recompute the value
// (see recompute.h). Both would be wrong if the value was written to in between without autograd's
// knowledge, so a node remembers what it made.

namespace brim::nn {

using compat::make_node;
using compat::NodePtr;
using compat::PtrTo;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

/// Which saved-tensor hooks are in force; null for none, or for those that only watch.
[[nodiscard]] const void* hooks_in_force();

/// Which run of a block (brim/nn/block.h) goes on in this thread; 0 for none.
[[nodiscard]] std::uint64_t block_here();

/// Whether a layer asks the layers before it, at this call. What is kept while there is room is not
/// seen by saved-tensor hooks: under hooks, it is kept as torch keeps it.
[[nodiscard]] inline bool asks_now(Again again) {
  return again.is_always() || (again.is_if_short() && hooks_in_force() == nullptr);
}

/// Whether hooks that only watch hold this.
[[nodiscard]] bool is_watched(const SavedVariable& saved);

/// Whether torch.compile, vmap or the like traces the call: strides and memory are not real then.
[[nodiscard]] bool is_traced(const at::Tensor& input);

[[nodiscard]] BRIM_API bool is_rehearsed(const at::Tensor& tensor);  // of brim/nn/rehearsal.h

/// Whether torch.func.grad differentiates it: an outer level may record what this one does not.
[[nodiscard]] inline bool is_wrapped(const at::Tensor& tensor) {
  return tensor.key_set().has(c10::DispatchKey::FuncTorchGradWrapper);
}

/// The same as is_traced, but for a rehearsal, in which strides and memory are those of the real
/// tensor.
[[nodiscard]] inline bool is_traced_by_others(const at::Tensor& input) {
  return is_traced(input) && !is_rehearsed(input);
}

/// A value at one moment: where it lies in memory, and how often that memory was written to.
struct TensorVersion {
  const void* memory = nullptr;
  std::uint32_t version = 0;

  bool operator==(const TensorVersion&) const = default;
};

[[nodiscard]] TensorVersion version_of(const at::Tensor& tensor);

class SavingNode : public Node {
 public:
  /// backward() and forget() under the lock.
  variable_list apply(variable_list&& grads) final;
  void release_variables() final;

  /// At the end of forward. Only what is set here is ever asked of this node.
  void set_output(const at::Tensor& output) {
    output_ = version_of(output);
    version_ = output.unsafeGetTensorImpl()->version_counter();
  }

  /// The output, as it was at forward.
  [[nodiscard]] const TensorVersion& output() const { return output_; }

  /// Elements of the output.
  [[nodiscard]] c10::SymInt elements() const;

  /// Whether nobody has written to the output up to now, autograd's own operators included.
  [[nodiscard]] bool is_untouched() const {
    return version_.enabled() && version_.current_version() == output_.version;
  }

  /// Whether layers that run now may communicate with this one: not across the border of
  /// saved-tensor hooks, or of a block. What a region that runs again keeps must not depend on what
  /// came before it, which is another graph when the region runs again.
  [[nodiscard]] bool is_near() const { return has_same_hooks() && block_ == block_here(); }

  /// The same without the border of blocks, which counts for nothing where a value is overwritten:
  /// such a block does not run again.
  [[nodiscard]] bool has_same_hooks() const { return hooks_ == hooks_in_force(); }

  /// A consumer keeps `output`, the value that this node made, for its own backward.
  virtual void output_is_kept(const at::Tensor& output) { (void)output; }

  /// The value that this node made is about to be overwritten.
  virtual void output_is_overwritten(const at::Tensor& output) { (void)output; }

  /// How many layers in a row recompute() must run to get this node's output from what is kept
  /// anyway; nothing if it cannot. Asked at forward.
  virtual std::optional<int> layers_to_recompute() const { return std::nullopt; }

  /// Whether recompute() runs a matrix product or a convolution, see product_layer_node.h.
  [[nodiscard]] virtual bool offers_product() const { return false; }

  /// Whether less is kept if a layer that reads its input anyway asks for it instead of keeping it.
  [[nodiscard]] virtual Again saves_if_asked() const { return offers_product(); }

  /// Arithmetic operations that recompute() takes for each element; 0 for a few passes over memory.
  [[nodiscard]] virtual double work() const { return 0; }

  /// Called at forward, before recompute() is relied on: from here on, changes to weights, biases
  /// and statistics must not affect it, or raise autograd's error.
  /// @param copies of small weights are made, so that they may change; without, that takes no time,
  ///        and changes raise the error
  /// @returns false if they were changed already
  [[nodiscard]] virtual bool prepare_to_recompute(bool copies) {
    (void)copies;
    return true;
  }

  /// The same for a loss, whose input, the logits, is by far the largest value of a language model:
  /// a matrix product may run again for it that does not for other layers. What recompute() gives
  /// is in memory that nobody else uses.
  [[nodiscard]] virtual bool prepare_for_loss(bool copies) {
    (void)copies;
    return false;
  }

  /// The same output, bit for bit. Called during backward, before this node itself runs, and
  /// without gradients (see recompute() in recompute.h).
  virtual at::Tensor recompute();

  /// The same output copied to another type, in one pass, or nothing if this node has no kernel for
  /// it.
  virtual std::optional<at::Tensor> recompute_as(at::ScalarType type) {
    (void)type;
    return std::nullopt;
  }

  /// relu(output + added) in one pass, or nothing if this node has no kernel for it.
  /// @param added undefined: nothing is added
  virtual std::optional<at::Tensor> recompute_relu(const at::Tensor& added) {
    (void)added;
    return std::nullopt;
  }

 protected:
  /// The gradients of the inputs. `grad` is defined.
  virtual variable_list backward(const at::Tensor& grad) = 0;

  /// Drops what is held for this backward call alone. After backward(), or in its place.
  virtual void forget() {}

  /// Drops what is kept for backward.
  virtual void release() {}

 private:
  const void* hooks_ = hooks_in_force();
  std::uint64_t block_ = block_here();
  TensorVersion output_;
  c10::VariableVersion version_;
};

/// An alias without a place in the graph. Unlike detach(), it keeps its place in the graphs of
/// outer levels of torch.func.grad.
[[nodiscard]] at::Tensor without_history(const at::Tensor& tensor);

/// In double backward: an alias at this place in the graph. Else `tensor` itself, also if it is
/// undefined.
[[nodiscard]] at::Tensor with_history(const at::Tensor& tensor, const torch::autograd::Edge& edge);

/// Tells the layer that made `input`, if it is one of ours, that its output is kept.
void tell_producer_kept(const at::Tensor& input);

/// Before an operator writes to `input` in place: autograd's checks, and tells that layer.
/// @param needed whether the operator is recorded
void will_overwrite(const at::Tensor& input, bool needed);

/// In double backward: `grad`, of a function whose second derivative is zero, connected to that
/// function's own input in the graph, as torch's is. Outside of double backward, `grad` itself.
/// @param zeros whether torch's second derivative is zeros, or undefined
[[nodiscard]] at::Tensor tied_to(const torch::autograd::Edge& input, const at::Tensor& grad,
                                 bool zeros = true);

/// Whether any of them needs a gradient now.
template <class... Tensors>
[[nodiscard]] bool needs_grad(const Tensors&... tensors) {
  return torch::autograd::compute_requires_grad(tensors...);
}

/// Whether autograd records what is done with them: one needs a gradient, and this is not below
/// autograd.
template <class... Tensors>
[[nodiscard]] bool is_recorded(const Tensors&... tensors) {
  return !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradOther) &&
         needs_grad(tensors...);
}

/// At the end of forward: `output` is what `node` made, which may be null. In place it counts as
/// written to.
template <bool InPlace, class Ptr>
void add_to_graph(at::Tensor& output, const Ptr& node) {
  if (InPlace) {
    torch::autograd::increment_version(output);
  }
  if (node == nullptr) {
    return;
  }
  if (InPlace) {
    torch::autograd::rebase_history(output, node);
  } else {
    torch::autograd::set_history(output, node);
  }
  node->set_output(output);
}

/// For operators that a backward calls: forward-mode gradients would be dropped silently.
/// @throws c10::NotImplementedError naming the layer.
void refuse_forward_ad(const char* layer, const at::Tensor& grad);

/// What kernels below autograd run under.
using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

/// What `run` gives below autograd: a node that is set afterwards is its history.
template <class Run>
auto below_autograd(const Run& run) {
  const BelowAutograd below;
  return run();
}

}  // namespace brim::nn
