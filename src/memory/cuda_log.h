#pragma once

#include <brim/memory/allocation_event.h>
#include <c10/core/Device.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace brim {

/// The events of torch's CUDA allocator on one device. torch calls back under its own lock, so
/// nothing here asks torch while it holds ours.
class CudaLog {
 public:
  bool start(c10::DeviceIndex device) {
    if (!attach()) {
      return false;
    }
    const std::lock_guard lock(mutex_);
    if (device_ >= 0) {
      return false;
    }
    device_ = device;
    is_open_.store(true, std::memory_order_release);
    return true;
  }

  std::vector<AllocationEvent> end() {
    const std::lock_guard lock(mutex_);
    is_open_.store(false, std::memory_order_release);
    device_ = -1;
    auto events = std::exchange(events_, {});
    return events.size() > kMostEvents ? std::vector<AllocationEvent>() : std::move(events);
  }

 private:
  // A longer log takes too long to evaluate.
  static constexpr std::size_t kMostEvents = std::size_t{1} << 16;

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
    if (!is_open_.load(std::memory_order_acquire) ||
        (!freed && !refused && entry.action_ != Entry::ALLOC)) {
      return;
    }
    const std::lock_guard lock(mutex_);
    if (entry.device_ == device_ && events_.size() <= kMostEvents) {
      events_.push_back(
          {.address = static_cast<std::uintptr_t>(entry.addr_),
           .bytes = static_cast<std::int64_t>(entry.size_),
           .stream = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(entry.stream_)),
           .freed = freed,
           .refused = refused});
    }
  }

  std::atomic<bool> is_open_{false};
  std::mutex mutex_;
  std::vector<AllocationEvent> events_;
  c10::DeviceIndex device_ = -1;  // -1: not open
};

}  // namespace brim
