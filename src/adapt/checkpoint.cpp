#include <brim/adapt/checkpoint.h>
#include <brim/memory/stats.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "memory/backend.h"

namespace brim {
namespace {

/// default_device() asks torch for all of its devices, which takes longer than all the rest. Which
/// kind there is does not change while the program runs; the current one of that kind may.
c10::Device device_of(const AdaptOptions& options) {
  if (options.device) {
    return options.device->is_cpu() ? *options.device : resolve_device(*options.device);
  }
  static const c10::DeviceType type = default_device().type();
  return type == c10::DeviceType::CPU ? c10::Device(type)
                                      : c10::impl::VirtualGuardImpl(type).getDevice();
}

}  // namespace

Checkpoint::Checkpoint(const AdaptOptions& options, Detail detail)
    : device_(device_of(options)), cpu_held_(CpuAllocator::instance().allocated()) {
  if (!device_.is_cpu() && detail == Detail::all) {
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
  return device == device_ ? device_held_ : std::nullopt;
}

void Checkpoint::restore_random_state() const {
  if (random_) {
    random_->restore();
  }
}

}  // namespace brim
