#include <brim/adapt/checkpoint.h>
#include <brim/memory/stats.h>

#include "memory/backend.h"

namespace brim {
namespace {

/// default_device() asks torch for its devices, which takes longer than all the rest; they do not
/// change while it runs, but for the current index.
c10::Device device_of(const AdaptOptions& options) {
  if (options.device) {
    return options.device->is_cpu() ? *options.device : resolve_device(*options.device);
  }
  static const bool cpu_only = default_device().is_cpu();
  return cpu_only ? c10::Device(c10::DeviceType::CPU) : default_device();
}

}  // namespace

Checkpoint::Checkpoint(const AdaptOptions& options)
    : device_(device_of(options)), cpu_held_(CpuAllocator::instance().allocated()) {
  if (!device_.is_cpu()) {
    device_held_ = backend_for(device_).peak(device_).current;
  }
  if (options.restore_random_state) {
    random_.emplace(device_);
  }
}

std::optional<std::int64_t> Checkpoint::held(c10::Device device) const {
  if (device.is_cpu()) {
    return cpu_held_;
  }
  return device == device_ ? std::optional<std::int64_t>(device_held_) : std::nullopt;
}

void Checkpoint::restore_random_state() const {
  if (random_) {
    random_->restore();
  }
}

}  // namespace brim
