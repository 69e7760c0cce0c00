#include <brim/nn/rerun.h>

#include <algorithm>

#include "nn/autograd/known.h"
#include "nn/autograd/rerun.h"

namespace brim::nn {
namespace {

struct Callable {
  std::function<at::Tensor(const variable_list&)> function;

  [[nodiscard]] static std::string_view name() { return "rerun"; }

  [[nodiscard]] at::Tensor value(const variable_list& inputs) const { return function(inputs); }

  [[nodiscard]] static std::optional<variable_list> grads(const at::Tensor& /*grad*/,
                                                          const variable_list& /*inputs*/,
                                                          const std::vector<bool>& /*needed*/) {
    return {};
  }
};

}  // namespace

at::Tensor functional::rerun(std::function<at::Tensor(const std::vector<at::Tensor>&)> function,
                             const std::vector<at::Tensor>& inputs, Again recompute,
                             bool is_cheap) {
  TORCH_CHECK_VALUE(!inputs.empty(), "rerun needs at least one input");
  const bool is_ours = needs_grad(at::TensorList(inputs)) &&
                       std::ranges::all_of(inputs, [](const auto& x) { return is_known(x); });
  if (!is_ours) {
    return function(inputs);
  }
  return run_and_keep_inputs(Callable{std::move(function)}, inputs, recompute, is_cheap);
}

}  // namespace brim::nn
