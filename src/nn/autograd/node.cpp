#include "nn/autograd/node.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/zeros_like.h>
#include <brim/nn/watching.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/graph_task.h>

#include "nn/autograd/for_this_backward.h"

namespace brim::nn {
namespace {

/// The gradient as it is, and zeros or nothing.
class TieNode final : public Node {
 public:
  explicit TieNode(bool zeros) : zeros_(zeros) {}

  variable_list apply(variable_list&& grads) override {
    variable_list result{grads[0], at::Tensor()};
    if (zeros_ && grads[0].defined() && task_should_compute_output(1)) {
      result[1] = at::zeros_like(grads[0]);
    }
    return result;
  }

  std::string name() const override { return "brim::tie_backward"; }

 private:
  bool zeros_;
};

thread_local HooksThatWatch watching;

/// The tensor whose memory a view looks at.
at::Tensor memory_of(const at::Tensor& input) {
  return input.is_view() ? at::Tensor(input._base()) : input;
}

/// The layer of ours that made this value; null if it is not its output any more.
SavingNode* producer_of(const at::Tensor& made) {
  auto* const node = dynamic_cast<SavingNode*>(made.grad_fn().get());
  const bool is_its_output =
      node != nullptr && node->has_same_hooks() && node->output() == version_of(made);
  return is_its_output ? node : nullptr;
}

}  // namespace

at::Tensor without_history(const at::Tensor& tensor) {
  if (!is_traced(tensor)) {
    // Without the dispatcher, which takes a microsecond. Of torch.func.grad's tensors the graph of
    // that level alone: an operator below autograd would be below that of outer levels, too.
    return tensor.variable_data();
  }
  const BelowAutograd below;
  return at::alias(tensor);
}

at::Tensor with_history(const at::Tensor& tensor, const torch::autograd::Edge& edge) {
  if (!at::GradMode::is_enabled() || !edge.is_valid() || !tensor.defined()) {
    return tensor;
  }
  at::Tensor placed = without_history(tensor);
  torch::autograd::impl::set_gradient_edge(placed, edge);
  return placed;
}

at::Tensor tied_to(const torch::autograd::Edge& input, const at::Tensor& grad, bool zeros) {
  if (!at::GradMode::is_enabled() || !grad.defined()) {
    return grad;
  }
  const auto node = make_node<TieNode>(zeros);
  node->set_next_edges({torch::autograd::impl::gradient_edge(grad), input});
  at::Tensor result = without_history(grad);
  torch::autograd::set_history(result, node);
  return result;
}

bool is_traced(const at::Tensor& input) {
  return c10::impl::TorchDispatchModeTLS::any_modes_set() ||
         input.key_set().has_any(
             c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                  c10::DispatchKey::Batched, c10::DispatchKey::FuncTorchBatched}));
}

variable_list SavingNode::apply(variable_list&& grads) {
  const std::lock_guard lock(mutex_);
  variable_list result = grads[0].defined() ? backward(grads[0]) : variable_list(num_outputs());
  forget();
  return result;
}

void SavingNode::release_variables() {
  const std::lock_guard lock(mutex_);
  release();
}

c10::SymInt SavingNode::elements() const {
  c10::SymInt elements = 1;
  for (const c10::SymInt& size : input_metadata(0).shape_as_dim_vector()) {
    elements = elements * size;
  }
  return elements;
}

at::Tensor SavingNode::recompute() {
  TORCH_INTERNAL_ASSERT(false, name(), " cannot give its output again");
}

int backward_now() { return torch::autograd::get_current_graph_task_id(); }

const void* hooks_in_force() {
  const auto& hooks = at::SavedTensorDefaultHooks::get_tls_state().stack;
  if (hooks.empty()) {
    return nullptr;
  }
  // Of the pair the one that every saved tensor holds: no other takes its address meanwhile.
  const c10::SafePyObject& unpack = hooks.top().second;
  const void* const top = unpack.ptr(&unpack.pyinterpreter());
  return top == watching.unpack ? watching.below : top;
}

HooksThatWatch hooks_that_watch() noexcept { return watching; }

void set_hooks_that_watch(const HooksThatWatch& hooks) noexcept { watching = hooks; }

bool is_watched(const SavedVariable& saved) {
  return watching.unpack != nullptr && saved.has_hooks() && watching.holds(saved);
}

TensorVersion version_of(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const c10::VariableVersion& version = impl.version_counter();
  return {impl.has_storage()
              ? static_cast<const void*>(impl.unsafe_storage().unsafeGetStorageImpl())
              : static_cast<const void*>(&impl),
          version.enabled() ? version.current_version() : 0};
}

void tell_producer_kept(const at::Tensor& input) {
  const at::Tensor made = memory_of(input);
  if (SavingNode* const node = producer_of(made); node != nullptr && node->is_near()) {
    node->output_is_kept(made);
  }
}

void will_overwrite(const at::Tensor& input, bool needed) {
  torch::autograd::check_inplace(input, needed);
  const at::Tensor made = memory_of(input);
  if (SavingNode* const node = producer_of(made)) {
    node->output_is_overwritten(made);
  }
}

void refuse_forward_ad(const char* layer, const at::Tensor& grad) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !torch::autograd::isFwGradDefined(grad), "the backward of brim's ", layer,
      " has no forward-mode derivative (torch.func.jvp): use torch.nn's layer there, "
      "brim.restore(model) puts it back");
}

}  // namespace brim::nn
