#include <brim/memory/bytes.h>
#include <brim/nn/audit.h>
#include <brim/text_table.h>
#include <c10/core/Allocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/utils.h>

#include <memory>
#include <ostream>
#include <tuple>
#include <typeindex>
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

/// A `Base` that records its calls.
template <class Base, class Forward = decltype(&Base::forward)>
class Watched;

template <class Base, class Owner, class... Args>
class Watched<Base, at::Tensor (Owner::*)(Args...)> : public Base {
 public:
  template <class From>
  Watched(const From& from, std::shared_ptr<Recorder> recorder, std::size_t layer)
      : Base(from), recorder_(std::move(recorder)), layer_(layer) {}

  // NOLINTNEXTLINE(bugprone-derived-method-shadowing-base-method): see brim/nn/layer.h
  at::Tensor forward(Args... args) {
    Call call(*recorder_, layer_, std::get<0>(std::tie(args...)));
    at::Tensor output = Base::forward(std::forward<Args>(args)...);
    call.finish(output);
    return output;
  }

 private:
  std::shared_ptr<Recorder> recorder_;
  std::size_t layer_;
};

using Watch = AnyModule (*)(const Module& from, const std::shared_ptr<Recorder>&,
                            std::size_t layer);

template <class From, class Base>
AnyModule watch(const Module& from, const std::shared_ptr<Recorder>& recorder, std::size_t layer) {
  return AnyModule(
      std::make_shared<Watched<Base>>(static_cast<const From&>(from), recorder, layer));
}

/// What can be put in the place of a layer of some type.
struct Kind {
  Watch theirs;
  Watch ours;
  AnyModule (*itself)(const std::shared_ptr<Module>& layer);
};

template <class Layer, class Theirs, class Ours>
Kind kind() {
  return {watch<Theirs, Theirs>, watch<Layer, Ours>, [](const std::shared_ptr<Module>& layer) {
            return AnyModule(std::static_pointer_cast<Layer>(layer));
          }};
}

const std::unordered_map<std::type_index, Kind>& kinds() {
  static const std::unordered_map<std::type_index, Kind> all = [] {
    std::unordered_map<std::type_index, Kind> made;
    for_each_layer(ConvertibleLayers(), [&]<class Ours>() {
      using Theirs = typename Ours::Theirs;
      made.emplace(typeid(Theirs), kind<Theirs, Theirs, Ours>());
      made.emplace(typeid(Ours), kind<Ours, Theirs, Ours>());
    });
    return made;
  }();
  return all;
}

/// While it lives, the model has watched layers in its containers.
class WatchedModel {
 public:
  WatchedModel(const std::vector<LayerPlace>& places, Watch Kind::* which,
               const std::shared_ptr<Recorder>& recorder) {
    std::unordered_map<const Module*, AnyModule> made;
    for (std::size_t i = 0; i < places.size(); ++i) {
      const LayerPlace& place = places[i];
      if (const auto found = kinds().find(typeid(*place.layer)); found != kinds().end()) {
        const Kind& kind = found->second;
        AnyModule& fresh = made[place.layer.get()];
        if (fresh.is_empty()) {
          fresh = (kind.*which)(*place.layer, recorder, i + 1);
        }
        if (replace(place, fresh)) {
          undo_.push_back(
              {{place.parent, place.key, place.name, fresh.ptr()}, kind.itself(place.layer)});
        }
      }
    }
  }

  ~WatchedModel() {
    for (const auto& [place, layer] : undo_) {
      replace(place, layer);
    }
  }
  WatchedModel(const WatchedModel&) = delete;
  WatchedModel& operator=(const WatchedModel&) = delete;

 private:
  std::vector<std::pair<LayerPlace, AnyModule>> undo_;
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
std::vector<std::int64_t> measure(const std::vector<LayerPlace>& places, Watch Kind::* which,
                                  const std::function<at::Tensor()>& forward) {
  const auto recorder = std::make_shared<Recorder>();
  const WatchedModel watched(places, which, recorder);
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
  const auto torchs = measure(places, &Kind::theirs, forward);
  const auto ours = measure(places, &Kind::ours, forward);
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
