#pragma once

#include <brim/memory/allocation_event.h>
#include <c10/core/Device.h>

#include <atomic>
#include <cstddef>
#include <mutex>
#include <utility>
#include <vector>

namespace brim {

/// The events of an allocator on one device while the log is open. Thread-safe.
class EventLog {
 public:
  /// False if it is open already.
  bool start(c10::DeviceIndex device = 0) {
    const std::lock_guard lock(mutex_);
    if (is_open()) {
      return false;
    }
    device_ = device;
    is_open_.store(true, std::memory_order_release);
    return true;
  }

  /// The events; none if there were too many.
  std::vector<AllocationEvent> end() {
    const std::lock_guard lock(mutex_);
    is_open_.store(false, std::memory_order_release);
    auto events = std::exchange(events_, {});
    return events.size() > kMostEvents ? std::vector<AllocationEvent>() : std::move(events);
  }

  /// To be asked before an event is made, which takes time.
  [[nodiscard]] bool is_open() const { return is_open_.load(std::memory_order_acquire); }

  void note(const AllocationEvent& event, c10::DeviceIndex device = 0) {
    const std::lock_guard lock(mutex_);
    if (is_open() && device == device_ && events_.size() <= kMostEvents) {
      events_.push_back(event);
    }
  }

  /// For a forked process, which must find it unlocked; and there, with the lock held.
  [[nodiscard]] std::mutex& mutex() { return mutex_; }
  void close_in_child() { is_open_.store(false, std::memory_order_relaxed); }

 private:
  // A longer log takes too long to evaluate.
  static constexpr std::size_t kMostEvents = std::size_t{1} << 16;

  std::atomic<bool> is_open_{false};
  std::mutex mutex_;
  std::vector<AllocationEvent> events_;
  c10::DeviceIndex device_ = 0;
};

}  // namespace brim
