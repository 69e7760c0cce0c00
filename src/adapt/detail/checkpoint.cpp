#include <ATen/Context.h>
#include <brim/adapt/detail/checkpoint.h>
#include <brim/memory/stats.h>

#include "memory/backend.h"

namespace brim {

Checkpoint::Checkpoint(const AdaptOptions& options, Detail detail)
    : cpu_held_(CpuAllocator::allocated()), onednn_(at::globalContext().userEnabledMkldnn()) {
  if (options.device) {
    device_ = resolve_device(*options.device);
  } else if (detail == Detail::all) {
    device_ = default_device();
  }
  if (detail == Detail::all && !device_->is_cpu()) {
    device_held_ = backend_for(*device_).peak(*device_).current;
  }
  if (options.restore_random_state) {
    random_.emplace(c10::Device(device_ ? device_->type() : default_device_type()));
  }
}

c10::Device Checkpoint::device() const {
  if (!device_) {
    device_ = default_device();
  }
  return *device_;
}

std::optional<std::int64_t> Checkpoint::held(c10::Device device) const {
  if (device.is_cpu()) {
    return cpu_held_;
  }
  return device_ == device ? device_held_ : std::nullopt;
}

void Checkpoint::restore_random_state() const {
  if (random_) {
    random_->restore();
  }
}

void Checkpoint::restore_onednn() const {
  if (onednn_) {
    at::globalContext().setUserEnabledMkldnn(true);
  }
}

}  // namespace brim
