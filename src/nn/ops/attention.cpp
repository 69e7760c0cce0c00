#include "nn/ops/attention.h"

#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <brim/nn/rerun.h>
#include <c10/core/SymBool.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <optional>

#include "nn/autograd/node.h"
#include "nn/autograd/random_state.h"

namespace brim::nn {
namespace {

using MaybeTensor = std::optional<at::Tensor>;

constexpr std::int64_t kWrittenOut = 0;  // at::sdp::SDPBackend::math

/// A real tensor that takes one row of memory, in the place of one that is only traced.
at::Tensor stand_in(const at::Tensor& tensor) {
  if (!is_traced(tensor) || tensor.dim() == 0) {
    return tensor;
  }
  const std::int64_t step = std::max<std::int64_t>(tensor.stride(-1), 1);
  return at::empty({tensor.size(-1), step}, at::dtype(tensor.scalar_type()))
      .select(1, 0)
      .expand(tensor.sizes());
}

/// Attention with the same options and the same random numbers whenever it runs.
class Attention {
 public:
  Attention(MaybeTensor mask, double dropout_p, bool is_causal, std::optional<double> scale,
            bool enable_gqa)
      : mask_(std::move(mask)),
        dropout_p_(dropout_p),
        is_causal_(is_causal),
        scale_(scale),
        enable_gqa_(enable_gqa),
        version_(mask_version()) {}

  [[nodiscard]] bool is_written_out(const at::Tensor& query, const at::Tensor& key,
                                    const at::Tensor& value) const {
    // torch does not tell for tensors that are only traced. Without Python's modes:
    const c10::impl::ExcludeDispatchKeyGuard no_modes(
        c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
    const at::NoGradGuard no_grad;
    return at::_fused_sdp_choice(stand_in(query), stand_in(key), stand_in(value),
                                 mask_ ? MaybeTensor(stand_in(*mask_)) : mask_, dropout_p_,
                                 is_causal_, scale_, enable_gqa_) == kWrittenOut;
  }

  at::Tensor operator()(const std::vector<at::Tensor>& inputs) {
    TORCH_CHECK(mask_version() == version_,
                "attn_mask was written to between forward and backward, which needs it as it was");
    if (dropout_p_ == 0.0) {
      return run(inputs);
    }
    if (!random_state_) {
      random_state_.emplace(c10::DeviceType::CPU);
      return run(inputs);
    }
    const WithRandomState as_before(*random_state_, c10::DeviceType::CPU);
    return run(inputs);
  }

 private:
  [[nodiscard]] at::Tensor run(const std::vector<at::Tensor>& inputs) const {
    return at::scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], mask_, dropout_p_,
                                            is_causal_, scale_, enable_gqa_);
  }

  [[nodiscard]] std::uint32_t mask_version() const {
    return mask_ && mask_->defined() ? version_of(*mask_).version : 0;
  }

  MaybeTensor mask_;
  double dropout_p_;
  bool is_causal_;
  std::optional<double> scale_;
  bool enable_gqa_;
  std::uint32_t version_;
  std::optional<RandomState> random_state_;  // of the CPU, if it needs some
};

}  // namespace

std::optional<at::Tensor> attention_again(const at::Tensor& query, const at::Tensor& key,
                                          const at::Tensor& value, const MaybeTensor& mask,
                                          double dropout_p, bool is_causal,
                                          std::optional<double> scale, bool enable_gqa) {
  const bool trains_mask = mask && mask->defined() && mask->requires_grad();
  // Of each query torch keeps its weights, running again its row. Where the weights are shorter
  // than that, there is little to save, and not enough work for the second run to be hidden.
  const bool saves = key.dim() >= 2 && query.dim() >= 2 &&
                     TORCH_GUARD_OR_FALSE(key.sym_size(-2).sym_ge(query.sym_size(-1)));
  Attention attention(mask, dropout_p, is_causal, scale, enable_gqa);
  if (!saves || !query.is_cpu() || !key.is_cpu() || !value.is_cpu() || trains_mask ||
      !attention.is_written_out(query, key, value)) {
    return {};
  }
  return functional::rerun(std::move(attention), {query, key, value}, /*recompute=*/true,
                           /*is_cheap=*/false);
}

}  // namespace brim::nn
