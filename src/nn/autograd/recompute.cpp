#include "nn/autograd/recompute.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/relu.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <typeindex>
#include <unordered_map>

namespace brim::nn {
namespace {

namespace torchs = torch::autograd::generated;

// -- Views: they share memory and version with what they look at ---------------------------------

using ViewAgain = at::Tensor (*)(const Edge& view, const at::Tensor& base);

at::Tensor reshape(const Edge& view, const at::Tensor& base) {
  return base.reshape_symint(view.function->input_metadata(view.input_nr).shape_as_dim_vector());
}

template <class View>
const View& as(const Node& node) {
  return static_cast<const View&>(node);
}

template <class View>
const View& as(const Edge& edge) {
  return as<View>(*edge.function);
}

/// What this node of torch did to its input; null if it made no view.
ViewAgain view_made_by(const Node& node) {
  using namespace torchs;  // NOLINT(google-build-using-namespace): a table of its names
  static const std::unordered_map<std::type_index, ViewAgain> views = {
      {typeid(AliasBackward0), reshape},
      {typeid(ReshapeAliasBackward0), reshape},
      {typeid(SqueezeBackward0), reshape},
      {typeid(SqueezeBackward1), reshape},
      {typeid(SqueezeBackward2), reshape},
      {typeid(UnsqueezeBackward0), reshape},
      {typeid(ViewBackward0), reshape},
      {typeid(PermuteBackward0),
       [](const Edge& view, const at::Tensor& base) {
         return base.permute(as<PermuteBackward0>(view).dims);
       }},
      {typeid(TransposeBackward0),
       [](const Edge& view, const at::Tensor& base) {
         const auto& by = as<TransposeBackward0>(view);
         return base.transpose(by.dim0, by.dim1);
       }},
      {typeid(TBackward0), [](const Edge&, const at::Tensor& base) { return base.t(); }},
      {typeid(SelectBackward0),
       [](const Edge& view, const at::Tensor& base) {
         const auto& by = as<SelectBackward0>(view);
         return base.select_symint(by.dim, by.index);
       }},
      {typeid(SliceBackward0),
       [](const Edge& view, const at::Tensor& base) {
         const auto& by = as<SliceBackward0>(view);
         return base.slice_symint(by.dim, by.start, by.end, by.step);
       }},
      // Several views by one node: chunk() is a split.
      {typeid(SplitBackward0),
       [](const Edge& view, const at::Tensor& base) {
         const auto& by = as<SplitBackward0>(view);
         return base.split_symint(by.split_size, by.dim)[view.input_nr];
       }},
      {typeid(SplitWithSizesBackward0),
       [](const Edge& view, const at::Tensor& base) {
         const auto& by = as<SplitWithSizesBackward0>(view);
         return base.split_with_sizes_symint(by.split_sizes, by.dim)[view.input_nr];
       }},
      {typeid(UnbindBackward0),
       [](const Edge& view, const at::Tensor& base) {
         return base.select_symint(as<UnbindBackward0>(view).dim, view.input_nr);
       }},
  };
  const auto found = views.find(typeid(node));
  return found != views.end() ? found->second : nullptr;
}

/// The node that made the memory which a view looks at, as its first output; else null.
Node* behind_views(const Edge& origin) {
  const Edge* edge = &origin;
  while (edge->is_valid() && view_made_by(*edge->function) != nullptr) {
    edge = &edge->function->next_edge(0);
  }
  return edge->input_nr == 0 ? edge->function.get() : nullptr;
}

// -- Outputs that torch's own nodes keep for their backward --------------------------------------

template <class Attention>
const SavedVariable& output_of(const Node& node) {
  return as<Attention>(node).output_;
}

/// Null if it is not known to keep its output.
const SavedVariable* output_kept_by(const Node& node) {
  using namespace torchs;  // NOLINT(google-build-using-namespace): a table of its names
  using Find = const SavedVariable& (*)(const Node&);
  static const std::unordered_map<std::type_index, Find> keepers = {
      {typeid(ScaledDotProductCudnnAttentionBackward0),
       output_of<ScaledDotProductCudnnAttentionBackward0>},
      {typeid(ScaledDotProductEfficientAttentionBackward0),
       output_of<ScaledDotProductEfficientAttentionBackward0>},
      {typeid(ScaledDotProductFlashAttentionBackward0),
       output_of<ScaledDotProductFlashAttentionBackward0>},
      {typeid(ScaledDotProductFlashAttentionForCpuBackward0),
       output_of<ScaledDotProductFlashAttentionForCpuBackward0>},
  };
  const auto found = keepers.find(typeid(node));
  return found != keepers.end() ? &found->second(node) : nullptr;
}

/// What it keeps, if no saved-tensor hook has it; the version is that of this moment.
std::optional<TensorVersion> version_kept_by(Node& node) {
  const SavedVariable* const saved = output_kept_by(node);
  if (saved == nullptr || hooks_in_force() != nullptr) {
    return std::nullopt;
  }
  const auto output = is_watched(*saved) ? std::optional(saved->unpack(compat::pointer_to(node)))
                                         : saved->get_raw_data();
  return output && output->defined() ? std::optional(version_of(*output)) : std::nullopt;
}

/// Whether the node's output has not been written to since.
bool is_untouched(Node& node) {
  if (const auto* const layer = dynamic_cast<const SavingNode*>(&node)) {
    return layer->is_near() && layer->is_untouched();
  }
  const auto kept = version_kept_by(node);
  return kept && kept->version == 0;
}

/// Whether `value` is the node's output, as it was at forward.
bool made(Node& node, const TensorVersion& value) {
  if (const auto* const layer = dynamic_cast<const SavingNode*>(&node)) {
    return layer->is_near() && layer->output() == value;
  }
  return value.version == 0 && version_kept_by(node) == value;
}

/// Only for nodes for which is_untouched() or made() is true.
std::optional<int> layers_of(const Node& node) {
  const auto* const layer = dynamic_cast<const SavingNode*>(&node);
  return layer != nullptr ? layer->layers_to_recompute() : std::optional(0);
}

// -- Copies and sums: one between two layers, because torch's nodes do not know whether somebody
//    wrote to what they made ---------------------------------------------------------------------

/// For what was copied or added: its maker, if it has not been written to since, else null.
Node* maker_behind(const Edge& edge) {
  Node* const node = behind_views(edge);
  return node != nullptr && is_untouched(*node) ? node : nullptr;
}

/// Where the source of a copy was made, in the same or another type but on the same device; null if
/// the node made no copy.
const Edge* source_of_copy(const Node& node) {
  const auto is = [&](const std::type_info& type) { return typeid(node) == type; };
  const bool is_reshape = is(typeid(torchs::UnsafeViewBackward0));  // one that had to copy
  if (!is_reshape && !is(typeid(torchs::CloneBackward0)) && !is(typeid(torchs::ToCopyBackward0))) {
    return nullptr;
  }
  const Edge& source = node.next_edge(0);
  if (!source.is_valid()) {
    return nullptr;
  }
  if (is_reshape) {
    return typeid(*source.function) == typeid(torchs::CloneBackward0)
               ? &source.function->next_edge(0)
               : nullptr;
  }
  const auto& before = source.function->input_metadata(source.input_nr);
  return before.device() == node.input_metadata(0).device() ? &source : nullptr;
}

/// The node that made `value`, through views and at most one copy; null if it is unknown.
Node* maker_of(const Edge& origin, const TensorVersion& value) {
  Node* const node = behind_views(origin);
  if (node == nullptr) {
    return nullptr;
  }
  if (const Edge* const source = source_of_copy(*node)) {
    return value.version == 0 ? maker_behind(*source) : nullptr;
  }
  return made(*node, value) ? node : nullptr;
}

/// A plain sum: no factor, no promotion of types, no broadcasting.
bool is_plain(const torchs::AddBackward0& sum) {
  const auto& result = sum.input_metadata(0);
  const auto like_result = [&](const Edge& edge) {
    const auto& operand = edge.function->input_metadata(edge.input_nr);
    return operand.shape_as_dim_vector() == result.shape_as_dim_vector() &&
           operand.dtype() == result.dtype();
  };
  return sum.alpha.equal(1) && like_result(sum.next_edge(0)) && like_result(sum.next_edge(1));
}

/// Whether the sum took the place of this layer's output, and was not written to since.
bool is_in_place_of(const SavingNode* first, const TensorVersion& sum) {
  return first != nullptr && first->is_near() && first->output().memory == sum.memory &&
         first->output().version + 1 == sum.version;
}

std::optional<int> layers_of_sum(const torchs::AddBackward0& sum, const TensorVersion& value) {
  const Edge& first = sum.next_edge(0);
  if (!first.is_valid() || !sum.next_edge(1).is_valid() || !is_plain(sum)) {
    return std::nullopt;
  }
  const Node* made_first = nullptr;
  const auto* const layer = dynamic_cast<const SavingNode*>(first.function.get());
  if (is_in_place_of(layer, value)) {
    made_first = layer;
  } else if (value.version == 0) {
    made_first = maker_behind(first);
  }
  const Node* const made_second = maker_behind(sum.next_edge(1));
  if (made_first == nullptr || made_second == nullptr) {
    return std::nullopt;
  }
  const auto layers = layers_of(*made_first);
  return layers ? most_layers(layers, layers_of(*made_second)) : std::nullopt;
}

/// Behind views and at most one copy; null if it is none of ours.
SavingNode* layer_that_made(const at::Tensor& value) {
  return dynamic_cast<SavingNode*>(maker_of(origin_of(value), version_of(value)));
}

bool is_of_one_size(const Edge& one, const Edge& other) {
  const auto elements = [](const Edge& edge) {
    const auto sizes = edge.function->input_metadata(edge.input_nr).shape_as_dim_vector();
    return std::accumulate(sizes.begin(), sizes.end(), c10::SymInt(1), std::multiplies<>());
  };
  return TORCH_GUARD_OR_FALSE(elements(one).sym_eq(elements(other)));
}

at::Tensor value_again(const Edge& origin);

at::Tensor value_again_as(const Edge& origin, at::ScalarType type) {
  if (auto* const layer = dynamic_cast<SavingNode*>(origin.function.get())) {
    if (auto fused = layer->recompute_as(type)) {
      return *std::move(fused);
    }
  }
  // What is behind a view of all of it may have a kernel for the other type.
  if (const ViewAgain view = view_made_by(*origin.function)) {
    const Edge& base = origin.function->next_edge(0);
    if (is_of_one_size(origin, base)) {
      return view(origin, value_again_as(base, type));
    }
  }
  return value_again(origin).to(type);
}

at::Tensor value_again(const Edge& origin) {
  Node& node = *origin.function;
  if (auto* const layer = dynamic_cast<SavingNode*>(&node)) {
    return layer->recompute();
  }
  if (const SavedVariable* const kept = output_kept_by(node)) {
    return kept->unpack(compat::pointer_to(node));
  }
  if (typeid(node) == typeid(torchs::ToCopyBackward0)) {
    return value_again_as(node.next_edge(0),
                          c10::typeMetaToScalarType(node.input_metadata(0).options().dtype()));
  }
  const at::Tensor source = value_again(node.next_edge(0));
  if (typeid(node) == typeid(torchs::AddBackward0)) {
    return at::add(source, value_again(node.next_edge(1)));
  }
  if (typeid(node) == typeid(torchs::UnsafeViewBackward0)) {
    return reshape(origin, source);
  }
  const ViewAgain view = view_made_by(node);
  return view != nullptr ? view(origin, source) : source;  // of a copy the values count
}

/// Fused with the layer before, where that can be.
at::Tensor relu_again(const Edge& origin) {
  Node& node = *origin.function;
  if (auto* const layer = dynamic_cast<SavingNode*>(&node)) {
    if (auto fused = layer->recompute_relu({})) {
      return *std::move(fused);
    }
    return at::relu(layer->recompute());
  }
  if (typeid(node) != typeid(torchs::AddBackward0)) {
    return at::relu(value_again(origin));
  }
  const at::Tensor added = value_again(node.next_edge(1));
  const Edge& first = node.next_edge(0);
  if (auto* const layer = dynamic_cast<SavingNode*>(first.function.get())) {
    if (auto fused = layer->recompute_relu(added)) {
      return *std::move(fused);
    }
  }
  return at::relu(at::add(value_again(first), added));
}

bool has_strides(const at::Tensor& value, c10::SymIntArrayRef strides) {
  return strides.empty() || is_traced(value) || value.sym_strides() == strides;
}

at::Tensor with_strides(at::Tensor value, c10::SymIntArrayRef strides) {
  if (has_strides(value, strides)) {
    return value;
  }
  return at::empty_strided_symint(value.sym_sizes(), strides, value.options()).copy_(value);
}

}  // namespace

bool prepare_maker_for_loss(const at::Tensor& value, bool copies) {
  SavingNode* const layer = layer_that_made(value);
  return layer != nullptr && layer->prepare_for_loss(copies);
}

bool is_from_product(const at::Tensor& value) {
  const SavingNode* const layer = layer_that_made(value);
  return layer != nullptr && layer->offers_product();
}

double work_of_maker(const at::Tensor& value) {
  const SavingNode* const layer = layer_that_made(value);
  return layer != nullptr ? layer->work() : 0;
}

double work_to_recompute(const at::Tensor& value) {
  const SavingNode* const layer = layer_that_made(value);
  return layer != nullptr && layer->offers_product() ? layer->work() : 0;
}

Again is_worth_asking_for(const at::Tensor& value) {
  const SavingNode* const layer = layer_that_made(value);
  const bool is_whole =
      layer != nullptr && (version_of(value).memory == layer->output().memory ||
                           TORCH_GUARD_OR_FALSE(value.sym_numel().sym_eq(layer->elements())));
  return is_whole ? layer->saves_if_asked() : Again(false);
}

std::optional<int> layers_to_recompute(const Edge& origin, const TensorVersion& value) {
  const Node* const node = behind_views(origin);
  if (node != nullptr && typeid(*node) == typeid(torchs::AddBackward0)) {
    return layers_of_sum(as<torchs::AddBackward0>(*node), value);
  }
  const Node* const maker = maker_of(origin, value);
  return maker != nullptr ? layers_of(*maker) : std::nullopt;
}

bool prepare_to_recompute(Node& node, bool copies) {
  if (auto* const layer = dynamic_cast<SavingNode*>(&node)) {
    return layer->prepare_to_recompute(copies);
  }
  return output_kept_by(node) != nullptr ||
         std::all_of(node.next_edges().begin(), node.next_edges().end(), [&](const Edge& edge) {
           return prepare_to_recompute(*edge.function, copies);
         });
}

at::Tensor recompute(const Edge& origin, c10::SymIntArrayRef strides) {
  const at::AutoGradMode without(false);
  return with_strides(value_again(origin), strides);
}

at::Tensor recompute_relu(const Edge& origin, c10::SymIntArrayRef strides) {
  const at::AutoGradMode without(false);
  at::Tensor value = relu_again(origin);
  if (has_strides(value, strides)) {
    return value;
  }
  const at::Tensor input =
      at::empty_strided_symint(value.sym_sizes(), strides, value.options().device(at::kMeta));
  return with_strides(std::move(value), at::empty_like(input).sym_strides());
}

}  // namespace brim::nn
