#include "memory/backend.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <atomic>

#include "cuda_library.h"
#include "fork.h"

namespace brim {
namespace {

std::atomic<DeviceBackend*> cuda_backend{nullptr};

/// Whether the driver answers at all.
bool answers(c10::DeviceType type) {
  try {
    c10::impl::VirtualGuardImpl(type).getDevice();
    return true;
  } catch (const c10::Error&) {
    return false;  // whatever it says, also of memory: it cannot be used
  }
}

}  // namespace

c10::DeviceIndex device_count(c10::DeviceType type) {
  // Without a CUDA device, torch.compile registers a stand-in guard that counts one.
  if (!c10::impl::hasDeviceGuardImpl(type) ||
      (type == c10::DeviceType::CUDA && !at::globalContext().hasCUDA())) {
    return 0;
  }
  return c10::impl::VirtualGuardImpl(type).deviceCount();
}

bool accelerator_initialized() {
  try {
    const auto type = at::accelerator::getAccelerator(false);
    return type && device_allocator(*type).initialized();
  } catch (const c10::Error&) {
    return false;  // no allocator that could be asked
  }
}

c10::DeviceType detail::find_default_device_type() {
  static const c10::DeviceType type = [] {
    const auto accelerator = at::accelerator::getAccelerator(false);
    return accelerator && device_count(*accelerator) > 0 ? *accelerator : c10::DeviceType::CPU;
  }();
  only_cpu.store(type == c10::DeviceType::CPU, std::memory_order_relaxed);
  return lost_to_fork(type) ? c10::DeviceType::CPU : type;
}

bool lost_to_fork(c10::DeviceType type) {
  if (type == c10::DeviceType::CPU || !is_forked_child()) {
    return false;
  }
  // The parent may have asked the driver how many devices there are without using one.
  static const bool silent = !answers(type);
  return forked_with_accelerator() || silent;
}

void register_cuda_backend(DeviceBackend& backend) { cuda_backend.store(&backend); }

DeviceBackend& backend_for(c10::Device device) {
  if (device.is_cpu()) {
    return cpu_backend();
  }
  if (device.is_cuda()) {
    load_cuda_library();  // registers its own; without it CUDA can be measured but not limited
    if (DeviceBackend* const cuda = cuda_backend.load()) {
      return *cuda;
    }
  }
  static auto* const accelerator = new AcceleratorBackend;
  return *accelerator;
}

c10::Device resolve_device(c10::Device device) {
  if (device.is_cpu()) {
    return c10::Device(c10::DeviceType::CPU);
  }
  // Calls that name their device ask every time: the answer for the last one is kept.
  static std::atomic<c10::Device> last{c10::Device(c10::DeviceType::CPU)};
  if (device.has_index() && device == last.load(std::memory_order_relaxed) && !is_forked_child()) {
    return device;
  }
  TORCH_CHECK_VALUE(at::accelerator::isAccelerator(device.type()),
                    "device must be the CPU or an accelerator, got ", device.str());
  // Counting devices first replaces torch's long complaints about a missing driver.
  const c10::DeviceIndex count = device_count(device.type());
  TORCH_CHECK_VALUE(count > 0, "device is ", device.str(), ", but torch sees no ",
                    c10::DeviceTypeName(device.type()), " device here");
  TORCH_CHECK_VALUE(!lost_to_fork(device.type()), "device is ", device.str(),
                    ", which cannot be used in a process forked from one that used it: start it "
                    "with \"spawn\"");
  at::globalContext().lazyInitDevice(device.type());
  if (!device.has_index()) {
    return c10::impl::VirtualGuardImpl(device.type()).getDevice();
  }
  TORCH_CHECK_VALUE(device.index() >= 0 && device.index() < count, "device is ", device.str(),
                    ", but torch sees only ", static_cast<int>(count), " ",
                    c10::DeviceTypeName(device.type()), " device(s)");
  last.store(device, std::memory_order_relaxed);
  return device;
}

c10::Device default_device() { return resolve_device(c10::Device(default_device_type())); }

}  // namespace brim
