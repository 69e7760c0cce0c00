#include <ATen/Context.h>
#include <brim/adapt/detail/checkpoint.h>
#include <brim/memory/stats.h>

#include <atomic>

#include "memory/backend.h"

namespace brim {
namespace {

/// Asked for once: on Arm the guard behind globalContext() waits for the lock that the last call
/// gave back.
at::Context& context() {
  static constinit std::atomic<at::Context*> known{nullptr};
  at::Context* found = known.load(std::memory_order_relaxed);
  if (found == nullptr) [[unlikely]] {
    found = &at::globalContext();
    known.store(found, std::memory_order_relaxed);
  }
  return *found;
}

}  // namespace

Checkpoint::Checkpoint(const AdaptOptions& options, Detail detail)
    : cpu_held_(CpuAllocator::allocated()), onednn_(context().userEnabledMkldnn()) {
  if (options.device) [[unlikely]] {
    device_ = options.device->is_cpu() ? c10::Device(c10::DeviceType::CPU)
                                       : resolve_device(*options.device);
  } else if (detail == Detail::all) [[unlikely]] {
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
    context().setUserEnabledMkldnn(true);
  }
}

}  // namespace brim
