#pragma once

#include <brim/export.h>
#include <brim/memory/allocator_segment.h>
#include <brim/memory/out_of_memory.h>
#include <brim/memory/stats.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "memory/cpu_allocator.h"
#include "memory/live_blocks.h"

namespace brim {

/// What the rest of the module asks of a kind of device. One object per device type, never
/// destroyed; all members are thread-safe. Devices arrive with an index (see resolve_device).
class DeviceBackend {
 public:
  virtual ~DeviceBackend() = default;

  /// Everything in MemoryStats, where `peak` is the highest since the last take_peak.
  virtual MemoryStats stats(c10::Device device) = 0;

  /// Called before the first use by something that needs exact counts.
  virtual void prepare(c10::Device /*device*/) {}

  virtual PeakReading peak(c10::Device device) = 0;
  virtual PeakReading take_peak(c10::Device device) = 0;

  /// As stats(device).free and .allocated, but cheap enough for every step of a loop; the free
  /// bytes may be some milliseconds old where asking the system is slow.
  struct Room {
    std::int64_t allocated = 0;
    std::int64_t free = 0;
    std::int64_t reserved = 0;  ///< taken by a caching allocator, 0 where there is none
    std::int64_t reservable = 0;
  };
  virtual Room headroom(c10::Device device) {
    const MemoryStats now = stats(device);
    return {now.allocated, now.free, now.reserved, now.reservable};
  }

  /// Keeps the device's allocations under `bytes` from now on; empty takes the limit away.
  /// @throws c10::NotImplementedError where the device's allocator knows no limit.
  virtual void set_limit(c10::Device device, std::optional<std::int64_t> bytes) = 0;

  /// Gives cached memory back to the system.
  virtual void release_cached(c10::Device device) = 0;

  /// From now on its allocator asks reclaimed() before it refuses, and has gates.
  /// @returns these; null where that is not possible
  virtual AllocationGates* gates() { return nullptr; }

  /// How often its caching allocator had to give back what it had cached before it could serve a
  /// request: that takes long. 0 where there is no such allocator.
  virtual std::int64_t retries(c10::Device /*device*/) { return 0; }

  /// Whether what this thread runs there is captured for a graph, such as CUDA's.
  virtual bool is_capturing() { return false; }

  /// What its allocator does; null where the device cannot tell.
  virtual EventLog* log() { return nullptr; }

  /// Notes the blocks that it gives out from now on; null where the device cannot tell.
  virtual LiveBlocks* live_blocks() { return nullptr; }

  /// What its caching allocator holds; empty where the device cannot tell.
  virtual std::optional<std::vector<AllocatorSegment>> segments(c10::Device /*device*/) {
    return std::nullopt;
  }
};

/// @throws c10::ValueError where `device` has no memory that brim can see.
DeviceBackend& backend_for(c10::Device device);

DeviceBackend& cpu_backend();

/// For any accelerator whose allocator is a c10::DeviceAllocator. Measures but cannot limit.
class BRIM_API AcceleratorBackend : public DeviceBackend {
 public:
  MemoryStats stats(c10::Device device) override;
  PeakReading peak(c10::Device device) override;
  PeakReading take_peak(c10::Device device) override;
  void set_limit(c10::Device device, std::optional<std::int64_t> bytes) override;
  void release_cached(c10::Device device) override;
};

/// torch's allocator for this kind of accelerator. @throws c10::Error where there is none.
c10::DeviceAllocator& device_allocator(c10::DeviceType type);

/// How many devices of this kind torch sees.
c10::DeviceIndex device_count(c10::DeviceType type);

/// Whether torch has begun to use an accelerator in this process, or in the one it was forked from.
bool accelerator_initialized();

namespace detail {
inline constinit std::atomic<bool> only_cpu{false};  // this machine has no accelerator
c10::DeviceType find_default_device_type();
}  // namespace detail

/// The kind of default_device(), determined once: asking torch takes longer than a whole call.
inline c10::DeviceType default_device_type() {
  // Without the guard of a static: its acquire waits, on Arm, for the lock that the last call gave
  // back.
  if (detail::only_cpu.load(std::memory_order_relaxed)) [[likely]] {
    return c10::DeviceType::CPU;
  }
  return detail::find_default_device_type();
}

/// Whether an error names another device than the one that is watched. One that it names without an
/// index is the one of its type.
inline bool names_another(const OomCause& cause, c10::Device watched) {
  return cause.device && (cause.device->type() != watched.type() ||
                          (cause.device->has_index() && watched.has_index() &&
                           cause.device->index() != watched.index()));
}

/// Whether accelerators of this kind cannot be used here, because this process was forked from one
/// that used them. Work on the CPU must not ask for them then.
bool lost_to_fork(c10::DeviceType type);

/// The limit of the tightest budget that is open on `device`, in bytes; empty where none is.
std::optional<std::int64_t> budget_in_force(c10::Device device);

/// Used by libbrim_cuda when it is loaded, to add what needs CUDA's own headers.
BRIM_API void register_cuda_backend(DeviceBackend& backend);

}  // namespace brim
