#pragma once

#include <brim/memory/allocation_event.h>
#include <c10/core/Device.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <cstdint>
#include <vector>

#include "memory/event_log.h"

namespace brim {

/// The events of torch's CUDA allocator on one device. torch calls back under its own lock, so
/// nothing here asks torch while it holds ours.
class CudaLog {
 public:
  std::uint64_t start(c10::DeviceIndex device) { return attach() ? log_.start(device) : 0; }
  std::vector<AllocationEvent> end(std::uint64_t number) { return log_.end(number); }

 private:
  /// torch cannot be told to stop calling, so this is done once, at the first use.
  bool attach() {
    static const bool attached = [this] {
      try {
        c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(
            [this](const auto& entry) { note(entry); });
        return true;
      } catch (const c10::Error&) {  // cudaMallocAsync
        return false;
      }
    }();
    return attached;
  }

  template <class Entry>
  void note(const Entry& entry) {
    const bool freed = entry.action_ == Entry::FREE_COMPLETED;
    const bool refused = entry.action_ == Entry::OOM;
    if (!log_.is_open() || (!freed && !refused && entry.action_ != Entry::ALLOC)) {
      return;
    }
    log_.note({.address = static_cast<std::uintptr_t>(entry.addr_),
               .bytes = static_cast<std::int64_t>(entry.size_),
               .stream = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(entry.stream_)),
               .freed = freed,
               .refused = refused},
              entry.device_);
  }

  EventLog log_;
};

}  // namespace brim
