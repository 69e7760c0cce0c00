#include <brim/nn/run_block.h>

#include <ATen/core/grad_mode.h>
#include <brim/nn/block.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace brim::nn {
namespace {

using Tensors = std::vector<at::Tensor>;

std::vector<bool> modes_of(const torch::nn::Module& module) {
  std::vector<bool> modes;
  for (const auto& each : module.modules(/*include_self=*/false)) {
    modes.push_back(each->is_training());
  }
  modes.push_back(module.is_training());
  return modes;
}

/// What the call reads. Not running statistics, to which a call in training writes and on which its
/// values do not depend.
Tensors read_by(const torch::nn::Module& module) {
  Tensors tensors = module.parameters();
  for (const auto& buffer : module.named_buffers()) {
    const std::string& name = buffer.key();
    if (!module.is_training() ||
        (!name.ends_with("running_mean") && !name.ends_with("running_var") &&
         !name.ends_with("num_batches_tracked"))) {
      tensors.push_back(buffer.value());
    }
  }
  return tensors;
}

std::vector<std::int64_t> versions_of(const Tensors& tensors) {
  std::vector<std::int64_t> versions;
  for (const at::Tensor& tensor : tensors) {
    versions.push_back(tensor.is_inference() ? 0 : tensor._version());
  }
  return versions;
}

/// Running statistics are as before when this ends.
class BuffersAsBefore {
 public:
  explicit BuffersAsBefore(const torch::nn::Module& module) : buffers_(module.buffers()) {
    for (const at::Tensor& buffer : buffers_) {
      before_.push_back(buffer.clone());
    }
  }
  BuffersAsBefore(const BuffersAsBefore&) = delete;
  BuffersAsBefore& operator=(const BuffersAsBefore&) = delete;
  ~BuffersAsBefore() {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < buffers_.size(); ++i) {
      buffers_[i].copy_(before_[i]);
    }
  }

 private:
  Tensors buffers_;
  Tensors before_;
};

}  // namespace

at::Tensor run_block(torch::nn::Module& module, std::function<at::Tensor(const Tensors&)> function,
                     const Tensors& inputs) {
  TORCH_CHECK_VALUE(!inputs.empty(), "run_block needs at least one input");
  if (!Block::can_begin(inputs) || !Block::may_run_short(&module, inputs)) {
    return function(inputs);
  }
  const Tensors reads = read_by(module);
  const std::vector<std::int64_t> versions = versions_of(reads);
  const std::shared_ptr<Block> block = Block::begin(&module, inputs, module.name());
  at::Tensor output;
  try {
    output = function(inputs);
  } catch (...) {
    block->end({}, nullptr);
    throw;
  }
  if (versions_of(reads) != versions) {
    block->end({}, nullptr);
    return output;
  }
  Tensors given;
  for (const at::Tensor& input : inputs) {
    given.push_back(Block::without_past(input));
  }
  block->end(reads, [&module, owner = module.weak_from_this().lock(),
                     function = std::move(function), given = std::move(given),
                     modes = modes_of(module)] {
    TORCH_CHECK(modes == modes_of(module), "train() or eval() of ", module.name(),
                " was called between its forward and its backward, for which it must run again");
    const BuffersAsBefore buffers(module);
    function(given);
  });
  return output;
}

}  // namespace brim::nn
