#pragma once

#include <brim/memory/allocation_event.h>
#include <c10/core/Device.h>

#include <atomic>
#include <cstddef>
#include <mutex>
#include <new>
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
    events_.clear();  // those of the parent in a forked process
    is_too_long_ = false;
    is_open_.store(true, std::memory_order_release);
    return true;
  }

  /// The events; none if there were too many.
  std::vector<AllocationEvent> end() {
    const std::lock_guard lock(mutex_);
    is_open_.store(false, std::memory_order_release);
    auto events = std::exchange(events_, {});
    return is_too_long_ ? std::vector<AllocationEvent>() : std::move(events);
  }

  /// To be asked before an event is made, which takes time.
  [[nodiscard]] bool is_open() const { return is_open_.load(std::memory_order_acquire); }

  /// Called where memory may have just run out, also from deleters: it must not throw.
  void note(const AllocationEvent& event, c10::DeviceIndex device = 0) noexcept {
    const std::lock_guard lock(mutex_);
    if (!is_open() || device != device_ || is_too_long_) {
      return;
    }
    try {
      is_too_long_ = events_.size() == kMostEvents;
      events_.push_back(event);
    } catch (const std::bad_alloc&) {
      is_too_long_ = true;
    }
  }

  /// To be held while the process forks, so that the child finds it unlocked.
  [[nodiscard]] std::mutex& mutex() { return mutex_; }
  /// In the child, before that is released.
  void close_in_child() { is_open_.store(false, std::memory_order_relaxed); }

 private:
  // A longer log takes too long to evaluate.
  static constexpr std::size_t kMostEvents = std::size_t{1} << 16;

  std::atomic<bool> is_open_{false};
  std::mutex mutex_;
  std::vector<AllocationEvent> events_;
  bool is_too_long_ = false;
  c10::DeviceIndex device_ = 0;
};

}  // namespace brim
