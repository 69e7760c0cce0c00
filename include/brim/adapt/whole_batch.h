#pragma once

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/nn/modules/batchnorm.h>

#include <string>
#include <vector>

namespace brim {

/// Checks that no layer of a model sees more than one item at a time, as a BatchNorm in training
/// does: with Microbatches it would see a part instead of the batch, and the gradients would not be
/// those of the batch. A header of its own, because torch's take seconds to compile.
/// @throws c10::ValueError that names the layers.
inline void refuse_whole_batch(const torch::nn::Module& model) {
  const auto sees_batch = [](const auto* layer) {
    return layer != nullptr && (layer->is_training() || !layer->options.track_running_stats());
  };
  std::vector<std::string> names;
  const auto check = [&](const std::string& name, const torch::nn::Module& layer) {
    if (sees_batch(dynamic_cast<const torch::nn::BatchNorm1dImpl*>(&layer)) ||
        sees_batch(dynamic_cast<const torch::nn::BatchNorm2dImpl*>(&layer)) ||
        sees_batch(dynamic_cast<const torch::nn::BatchNorm3dImpl*>(&layer))) {
      names.push_back(name);
    }
  };
  check("the model", model);
  for (const auto& layer : model.named_modules(/*name_prefix=*/"", /*include_self=*/false)) {
    check(layer.key(), *layer.value());
  }
  TORCH_CHECK_VALUE(names.empty(), c10::Join(", ", names),
                    names.size() == 1 ? " normalises" : " normalise",
                    " over the whole batch, of which Microbatches shows a part at a time: call "
                    "eval() on such layers, or replace them with GroupNorm");
}

}  // namespace brim
