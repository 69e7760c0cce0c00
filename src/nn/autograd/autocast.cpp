#include "nn/autograd/autocast.h"

#include <ATen/autocast_mode.h>

namespace brim::nn {

Autocast::Autocast(c10::DeviceType device)
    : device_(device),
      low_(at::autocast::get_lower_precision_fp_from_device_type(device)),
      off_(at::autocast::get_autocast_dispatch_key_from_device_type(device)) {}

bool Autocast::changes(at::ScalarType to, const at::Tensor& tensor) const {
  return at::autocast::is_eligible(tensor, device_) && tensor.scalar_type() != to;
}

at::Tensor Autocast::cast(at::ScalarType to, const at::Tensor& tensor) const {
  return at::autocast::cached_cast(to, tensor, device_);
}

std::optional<at::Tensor> Autocast::cast(at::ScalarType to,
                                         const std::optional<at::Tensor>& tensor) const {
  return at::autocast::cached_cast(to, tensor, device_);
}

namespace {

/// Others (meta) have no autocast that brim's kernels would see.
bool has_autocast(c10::DeviceType device) { return device == at::kCPU || device == at::kCUDA; }

void put_in_force(const AutocastState& state, bool caches) {
  at::autocast::set_autocast_enabled(state.device, state.enabled);
  at::autocast::set_autocast_dtype(state.device, state.type);
  at::autocast::set_autocast_cache_enabled(caches);
}

}  // namespace

AutocastState::AutocastState(c10::DeviceType of) : device(of) {
  if (has_autocast(device)) {
    enabled = at::autocast::is_autocast_enabled(device);
    type = at::autocast::get_autocast_dtype(device);
  }
}

AutocastAs::AutocastAs(const AutocastState& state)
    : before_(state.device),
      caches_before_(at::autocast::is_autocast_cache_enabled()),
      changes_(before_.enabled != state.enabled ||
               (state.enabled && (before_ != state || caches_before_))) {
  if (changes_) {
    put_in_force(state, /*caches=*/false);
  }
}

AutocastAs::~AutocastAs() {
  if (changes_) {
    put_in_force(before_, caches_before_);
  }
}

}  // namespace brim::nn
