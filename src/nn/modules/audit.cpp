#include <brim/memory/bytes.h>
#include <brim/nn/audit.h>
#include <brim/text_table.h>
#include <c10/core/Allocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/nn/modules/common.h>
#include <torch/utils.h>

#include <memory>
#include <ostream>
#include <unordered_map>
#include <utility>

#include "nn/modules/layers.h"

namespace brim::nn {
namespace {

using torch::nn::AnyModule;
using torch::nn::Module;

/// Memory that was allocated while it watched a thread and is still held, by layer. Layers are
/// numbers; 0 is outside of all.
class Recorder final : public c10::MemoryReportingInfoBase {
 public:
  bool memoryProfilingEnabled() const override { return true; }

  void reportMemoryUsage(void* memory, std::int64_t change, std::size_t /*allocated*/,
                         std::size_t /*reserved*/, c10::Device /*device*/) override {
    if (change > 0) {
      blocks_[memory] = {change, layer_, false};
    } else {
      blocks_.erase(memory);
    }
  }

  /// What is allocated from now on belongs to `layer`. @return the layer until now.
  std::size_t enter(std::size_t layer) { return std::exchange(layer_, layer); }

  /// The layer keeps this tensor for backward; it counts for the first that does.
  void keep(const at::Tensor& tensor, std::size_t layer) {
    const auto found = blocks_.find(tensor.storage().data());
    if (found != blocks_.end() && !found->second.kept) {
      found->second = {found->second.bytes, layer, true};
    }
  }

  /// Bytes that are held, by layer; without `result`, unless a layer keeps it.
  [[nodiscard]] std::vector<std::int64_t> bytes(std::size_t layers, const void* result) const {
    std::vector<std::int64_t> sums(layers);
    for (const auto& [memory, block] : blocks_) {
      if (block.kept || memory != result) {
        sums[block.layer] += block.bytes;
      }
    }
    return sums;
  }

 private:
  struct Block {
    std::int64_t bytes;
    std::size_t layer;
    bool kept;  // by that layer; else only allocated there
  };

  std::unordered_map<const void*, Block> blocks_;
  std::size_t layer_ = 0;  // outside of all
};

/// A layer's call.
class Call {
 public:
  Call(Recorder& recorder, std::size_t layer, at::Tensor input)
      : recorder_(recorder),
        layer_(layer),
        before_(recorder.enter(layer)),
        input_(std::move(input)),
        references_(references(input_)) {}

  ~Call() { recorder_.enter(before_); }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void finish(const at::Tensor& output) {
    if (references(input_) > references_) {
      recorder_.keep(input_, layer_);
    }
    // A saved output is another tensor on its storage. So is the base of a view.
    if (output.has_storage() && output.storage().use_count() > (output.is_view() ? 2U : 1U)) {
      recorder_.keep(output, layer_);
    }
  }

 private:
  /// A saved input is another reference to the tensor, or to its storage.
  static std::size_t references(const at::Tensor& tensor) {
    return tensor.has_storage() ? tensor.use_count() + tensor.storage().use_count() : 0;
  }

  Recorder& recorder_;
  std::size_t layer_;
  std::size_t before_;
  at::Tensor input_;
  std::size_t references_;
};

/// Stands in a Sequential for one of its elements, and records its calls.
class Watched : public Module {
 public:
  Watched(AnyModule watched, std::shared_ptr<Recorder> recorder, std::size_t layer)
      : element(std::move(watched)), recorder_(std::move(recorder)), layer_(layer) {}

  /// @param output_size which only transposed convolutions take
  at::Tensor forward(const at::Tensor& input, const std::optional<at::IntArrayRef>& output_size) {
    Call call(*recorder_, layer_, input);
    at::Tensor output = output_size ? element.forward(input, output_size) : element.forward(input);
    call.finish(output);
    return output;
  }

  AnyModule element;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(std::optional<at::IntArrayRef>())})

 private:
  std::shared_ptr<Recorder> recorder_;
  std::size_t layer_;
};

}  // namespace
}  // namespace brim::nn

/// A Sequential that is asked for the layer returns the layer, not its watcher.
template <>
std::shared_ptr<torch::nn::Module> torch::nn::AnyModuleHolder<
    brim::nn::Watched, const at::Tensor&, const std::optional<at::IntArrayRef>&>::ptr() {
  return module->element.ptr();
}

namespace brim::nn {
namespace {

/// While it lives, the model has torch::nn's layers in its containers, or ours, and Sequentials
/// record their calls.
class WatchedModel {
 public:
  WatchedModel(const std::vector<LayerPlace>& places, bool ours,
               const std::shared_ptr<Recorder>& recorder) {
    std::unordered_map<const Module*, AnyModule> made;
    for (std::size_t i = 0; i < places.size(); ++i) {
      const LayerPlace& place = places[i];
      const Module& layer = *place.layer;
      const LayerRule* const other = rule_for(layer, ours ? &LayerRule::theirs : &LayerRule::ours);
      if (other == nullptr && !rule_for(layer, ours ? &LayerRule::ours : &LayerRule::theirs)) {
        continue;
      }
      AnyModule& fresh = made[&layer];
      if (fresh.is_empty()) {
        AnyModule wanted =
            other == nullptr ? place.element : (ours ? other->to_ours : other->to_theirs)(layer);
        if (wanted.is_empty()) {
          continue;  // it is the one wanted, and no Sequential calls it
        }
        fresh = AnyModule(std::make_shared<Watched>(std::move(wanted), recorder, i + 1));
      }
      if (replace(place, fresh.ptr(), fresh)) {
        undo_.emplace_back(&place, fresh.ptr());
      }
    }
  }

  ~WatchedModel() {
    for (const auto& [place, fresh] : undo_) {
      replace({place->parent, place->key, place->name, fresh, {}}, place->layer, place->element);
    }
  }
  WatchedModel(const WatchedModel&) = delete;
  WatchedModel& operator=(const WatchedModel&) = delete;

 private:
  std::vector<std::pair<const LayerPlace*, std::shared_ptr<Module>>> undo_;
};

/// Puts buffers such as running statistics back.
class BufferGuard {
 public:
  explicit BufferGuard(const Module& model) {
    for (const at::Tensor& buffer : model.buffers()) {
      buffers_.emplace_back(buffer, buffer.clone());
    }
  }

  ~BufferGuard() {
    const torch::NoGradGuard no_grad;
    for (auto& [buffer, before] : buffers_) {
      buffer.copy_(before);
    }
  }
  BufferGuard(const BufferGuard&) = delete;
  BufferGuard& operator=(const BufferGuard&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers_;
};

/// Bytes that one run keeps, by layer.
std::vector<std::int64_t> measure(const std::vector<LayerPlace>& places, bool ours,
                                  const std::function<at::Tensor()>& forward) {
  const auto recorder = std::make_shared<Recorder>();
  const WatchedModel watched(places, ours, recorder);
  at::Tensor output;  // holds the graph
  {
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, recorder);
    output = forward();
  }
  Call(*recorder, 0, output).finish(output);
  const void* const result = output.has_storage() ? output.storage().data() : nullptr;
  return recorder->bytes(places.size() + 1, result);
}

std::int64_t sum(const std::vector<LayerAudit>& layers, std::int64_t LayerAudit::* bytes) {
  std::int64_t total = 0;
  for (const LayerAudit& layer : layers) {
    total += layer.*bytes;
  }
  return total;
}

}  // namespace

std::int64_t Audit::torch_nn() const { return sum(layers, &LayerAudit::torch_nn); }
std::int64_t Audit::brim() const { return sum(layers, &LayerAudit::brim); }

std::ostream& operator<<(std::ostream& stream, const Audit& audit) {
  std::vector<std::vector<std::string>> rows;
  rows.reserve(audit.layers.size());
  for (const LayerAudit& layer : audit.layers) {
    rows.push_back(
        {layer.name, layer.type, format_bytes(layer.torch_nn), format_bytes(layer.brim)});
  }
  return stream << text_table(
                       {"layer", "type", "torch::nn", "brim"}, rows, 2,
                       {"total", "", format_bytes(audit.torch_nn()), format_bytes(audit.brim())})
                << '\n';
}

Audit audit(Module& model, const std::function<at::Tensor()>& forward) {
  TORCH_CHECK(c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE) == nullptr,
              "audit cannot count memory inside of a torch profiler");
  const c10::InferenceMode no_inference(false);
  const torch::AutoGradMode gradients(true);
  const BufferGuard buffers(model);
  const std::vector<LayerPlace> places = layer_places(model);
  const auto torchs = measure(places, false, forward);
  const auto ours = measure(places, true, forward);
  Audit result;
  for (std::size_t i = 0; i < places.size(); ++i) {
    const LayerPlace& place = places[i];
    result.layers.push_back({place.name, type_of(*place.layer), torchs[i + 1], ours[i + 1]});
  }
  if (torchs[0] != 0 || ours[0] != 0) {
    result.layers.push_back({"(other)", "", torchs[0], ours[0]});
  }
  return result;
}

}  // namespace brim::nn
