#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>

#include "memory/backend.h"

namespace brim {

c10::DeviceAllocator& device_allocator(c10::DeviceType type) {
  // c10::getDeviceAllocator casts on every call, which takes longer than what is then asked.
  static std::atomic<c10::DeviceAllocator*> known{nullptr};
  c10::DeviceAllocator* allocator = known.load(std::memory_order_relaxed);
  if (allocator == nullptr || allocator != c10::GetAllocator(type)) {
    allocator = c10::getDeviceAllocator(type);
    known.store(allocator, std::memory_order_relaxed);
  }
  return *allocator;
}

namespace {

constexpr auto kAggregate = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);

c10::CachingDeviceAllocator::DeviceStats device_stats(c10::Device device) {
  return device_allocator(device.type()).getDeviceStats(device.index());
}

}  // namespace

MemoryStats AcceleratorBackend::stats(c10::Device device) {
  const auto now = device_stats(device);
  MemoryStats stats;
  stats.allocated = now.allocated_bytes[kAggregate].current;
  stats.peak = now.allocated_bytes[kAggregate].peak;
  stats.reserved = now.reserved_bytes[kAggregate].current;
  stats.inactive_split = now.inactive_split_bytes[kAggregate].current;
  stats.alloc_retries = now.num_alloc_retries;
  stats.ooms = now.num_ooms;
  const auto [free, total] = device_allocator(device.type()).getMemoryInfo(device.index());
  stats.limit = static_cast<std::int64_t>(total);
  stats.reservable = static_cast<std::int64_t>(free) + stats.reserved;
  stats.free = stats.reservable - stats.allocated;
  return stats;
}

PeakReading AcceleratorBackend::peak(c10::Device device) {
  const auto allocated = device_stats(device).allocated_bytes[kAggregate];
  return {allocated.peak, allocated.current, allocated.current};
}

PeakReading AcceleratorBackend::take_peak(c10::Device device) {
  const PeakReading sample = AcceleratorBackend::peak(device);
  // c10 has no call that reads and resets at once: a peak of another thread exactly between the two
  // calls is lost.
  device_allocator(device.type()).resetPeakStats(device.index());
  return sample;
}

void AcceleratorBackend::set_limit(c10::Device device, std::optional<std::int64_t> /*bytes*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "a budget on ", device.str(), " is not possible: ",
      device.is_cuda() ? "this build of brim has no CUDA support (libbrim_cuda was not found)"
                       : "torch's allocator for this device knows no limit");
}

void AcceleratorBackend::release_cached(c10::Device device) {
  device_allocator(device.type()).emptyCache();
}

}  // namespace brim
