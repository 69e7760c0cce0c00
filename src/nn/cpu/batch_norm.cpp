#include "nn/cpu/batch_norm.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <vector>

#include "nn/ops/channels.h"
#include "nn/ops/cuda_kernels.h"

namespace brim::nn {
namespace {

// -- Which way to round ------------------------------------------------------------------------

constexpr std::int64_t kFormulas = 3;  // of the kernel `normalise`
constexpr std::int64_t kNone = -1;

// So few elements could agree by chance, and are cheap without a kernel of their own.
constexpr std::int64_t kFewElements = 4096;

using Key = std::vector<std::int64_t>;

/// All that cuDNN may choose by.
Key key_of(const NormOf& norm) {
  const at::Tensor& input = norm.input;
  Key key = {static_cast<std::int64_t>(input.scalar_type()),
             static_cast<std::int64_t>(norm.mean.scalar_type()),
             is_given(norm.weight) ? 1 : 0,
             is_given(norm.bias) ? 1 : 0,
             norm.eps >= 0 ? 1 : 0,
             input.device().index(),
             input.dim()};
  key.insert(key.end(), input.sizes().begin(), input.sizes().end());
  key.insert(key.end(), input.strides().begin(), input.strides().end());
  return key;
}

class Formulas {
 public:
  std::optional<std::int64_t> find(const Key& key) {
    const std::lock_guard lock(mutex_);
    const auto place = known_.find(key);
    return place == known_.end() ? std::nullopt : std::optional(place->second);
  }

  void remember(Key key, std::int64_t formula) {
    const std::lock_guard lock(mutex_);
    known_[std::move(key)] = formula;
  }

 private:
  std::mutex mutex_;
  std::map<Key, std::int64_t> known_;
};

Formulas& formulas() {
  static auto* const all = new Formulas;  // never destroyed: threads may outlive main
  return *all;
}

bool same_type(const MaybeTensor& tensor, const at::Tensor& as) {
  return !is_given(tensor) || tensor->scalar_type() == as.scalar_type();
}

bool is_in_order(const at::Tensor& tensor) {
  return tensor.is_contiguous(tensor.suggest_memory_format());
}

bool kernel_can(const NormOf& norm) {
  const at::Tensor& input = norm.input;
  const auto type = input.scalar_type();
  return input.is_cuda() && input.numel() >= kFewElements && type != at::kDouble &&
         is_in_order(input) && norm.mean.is_contiguous() && norm.spread.is_contiguous() &&
         (norm.mean.scalar_type() == type || norm.mean.scalar_type() == at::kFloat) &&
         norm.spread.scalar_type() == norm.mean.scalar_type() &&
         same_type(norm.weight, norm.mean) && same_type(norm.bias, norm.mean) &&
         cuda_kernels() != nullptr && cuda_kernels()->normalise != nullptr;
}

at::Tensor run_kernel(const NormOf& norm, std::int64_t formula, const at::Tensor& added,
                      bool relu) {
  at::Tensor output = at::empty_like(norm.input);
  cuda_kernels()->normalise(norm, formula, added, relu, output);
  return output;
}

/// Runs torch's forward and the kernel's ways beside it.
std::int64_t find_out(const NormOf& norm, const Key& key, const at::Tensor& reference) {
  if (reference.strides() != norm.input.strides()) {
    return kNone;
  }
  for (std::int64_t formula = 0; formula < kFormulas; ++formula) {
    if (at::equal(run_kernel(norm, formula, {}, false), reference)) {
      formulas().remember(key, formula);
      return formula;
    }
  }
  if (!at::isnan(reference).any().item<bool>()) {  // NaN equals nothing: try again another time
    formulas().remember(key, kNone);
  }
  return kNone;
}

// -- Backward ----------------------------------------------------------------------------------

using BackwardOp = std::tuple<at::Tensor, at::Tensor, at::Tensor>(
    const at::Tensor&, const at::Tensor&, const MaybeTensor&, const at::Tensor&, const at::Tensor&,
    double, std::array<bool, 3>);

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_anywhere(
    const at::Tensor& grad, const at::Tensor& input, const MaybeTensor& weight,
    const at::Tensor& running_mean, const at::Tensor& running_var, double eps,
    std::array<bool, 3> wanted) {
  // Forward gives empty ones in eval mode; undefined ones are an error on CUDA.
  const at::Tensor none = at::empty({0}, running_mean.options());
  return at::native_batch_norm_backward(grad, input, weight, running_mean, running_var, none, none,
                                        false, eps, wanted);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_cuda(
    const at::Tensor& grad, const at::Tensor& input, const MaybeTensor& weight,
    const at::Tensor& running_mean, const at::Tensor& running_var, double eps,
    std::array<bool, 3> wanted) {
  const auto type = input.scalar_type();
  const auto params = running_mean.scalar_type();
  const bool ours = cuda_kernels() != nullptr && cuda_kernels()->normalise_backward != nullptr &&
                    input.numel() > 0 && grad.scalar_type() == type &&
                    (params == type || params == at::kFloat) &&
                    running_var.scalar_type() == params && same_type(weight, running_mean);
  if (!ours) {
    return backward_anywhere(grad, input, weight, running_mean, running_var, eps, wanted);
  }
  const auto format = input.suggest_memory_format();
  const NormOf norm{input.contiguous(format), weight, {}, running_mean, running_var, eps};
  return cuda_kernels()->normalise_backward(norm, grad.contiguous(format), wanted[0]);
}

}  // namespace

std::optional<at::Tensor> batch_norm_again(const NormOf& norm, const at::Tensor& added, bool relu,
                                           const std::function<at::Tensor()>& reference) {
  if (!kernel_can(norm) || (added.defined() && (added.strides() != norm.input.strides() ||
                                                added.scalar_type() != norm.input.scalar_type()))) {
    return std::nullopt;
  }
  const Key key = key_of(norm);
  std::optional<std::int64_t> formula = formulas().find(key);
  if (!formula) {
    if (cuda_kernels()->is_capturing()) {
      return std::nullopt;  // the answer could not be read
    }
    formula = find_out(norm, key, reference());
  }
  return *formula == kNone ? std::nullopt : std::optional(run_kernel(norm, *formula, added, relu));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_eval_backward(
    const at::Tensor& grad, const at::Tensor& input, const MaybeTensor& weight,
    const at::Tensor& running_mean, const at::Tensor& running_var, double eps,
    std::array<bool, 3> wanted) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("brim::batch_norm_eval_backward", "")
                             .typed<BackwardOp>();
  return op.call(grad, input, weight, running_mean, running_var, eps, wanted);
}

TORCH_LIBRARY_FRAGMENT(brim, m) {
  m.def(
      "batch_norm_eval_backward(Tensor grad, Tensor input, Tensor? weight, Tensor running_mean, "
      "Tensor running_var, float eps, bool[3] wanted) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(brim, CUDA, m) { m.impl("batch_norm_eval_backward", backward_cuda); }

TORCH_LIBRARY_IMPL(brim, CompositeExplicitAutograd, m) {
  m.impl("batch_norm_eval_backward", backward_anywhere);
}

}  // namespace brim::nn
