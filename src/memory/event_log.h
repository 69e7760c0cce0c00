#pragma once

#include <brim/memory/allocation_event.h>
#include <c10/core/Device.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <new>
#include <unordered_set>
#include <utility>
#include <vector>

#include "memory/running_operator.h"

namespace brim {

/// The events of an allocator on one device while the log is open, and which of the blocks that it
/// made meanwhile are still in use at any later time. The CPU's index is -1, as in c10::Device.
/// Thread-safe.
class EventLog {
 public:
  /// A number for end(); 0 if it is open already.
  std::uint64_t start(c10::DeviceIndex device = -1) {
    const std::lock_guard lock(mutex_);
    if (is_open()) {
      return 0;
    }
    device_ = device;
    events_.clear();  // those of the parent in a forked process
    size_.store(0, std::memory_order_relaxed);
    is_too_long_ = false;
    open_.store(++started_, std::memory_order_relaxed);
    return started_;
  }

  /// The events; none if there were too many. Of a log that was open when the process forked, the
  /// child gets none, and does not end one that it has started itself.
  std::vector<AllocationEvent> end(std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    if (number != open_.load(std::memory_order_relaxed)) {
      return {};
    }
    open_.store(0, std::memory_order_relaxed);
    auto events = std::exchange(events_, {});
    return is_too_long_ ? std::vector<AllocationEvent>() : std::move(events);
  }

  /// To be asked before an event is made, which takes time. Without ordering: note() asks again
  /// under the lock.
  [[nodiscard]] bool is_open() const { return open_.load(std::memory_order_relaxed) != 0; }

  /// How many events the open log has.
  [[nodiscard]] std::size_t size() const { return size_.load(std::memory_order_relaxed); }

  /// Whether to note that a block is freed: a log is open, or has seen blocks that are in use.
  [[nodiscard]] bool wants_frees() const {
    return is_open() || in_use_.load(std::memory_order_relaxed) != 0;
  }

  /// Called where memory may have just run out, also from deleters: it must not throw.
  void note(AllocationEvent event, c10::DeviceIndex device = -1) noexcept {
    const RunningOperator running = running_operator();
    event.operation = running.number;
    event.name = running.name;
    event.path = running.path;
    const std::lock_guard lock(mutex_);
    try {
      if (event.freed && blocks_.erase(event.address) != 0) {
        in_use_.store(blocks_.size(), std::memory_order_relaxed);
      }
      if (!is_open() || device != device_ || is_too_long_) {
        return;
      }
      is_too_long_ = events_.size() == kMostEvents;
      events_.push_back(event);
      size_.store(events_.size(), std::memory_order_relaxed);
      if (!event.freed && !event.refused) {
        blocks_.insert(event.address);
        in_use_.store(blocks_.size(), std::memory_order_relaxed);
      }
    } catch (const std::bad_alloc&) {
      is_too_long_ = true;
    }
  }

  /// Whether the block at `address`, which was made while a log was open, is in use.
  [[nodiscard]] bool is_in_use(std::uintptr_t address) {
    const std::lock_guard lock(mutex_);
    return blocks_.contains(address);
  }

  /// To be held while the process forks, so that the child finds it unlocked.
  [[nodiscard]] std::mutex& mutex() { return mutex_; }
  /// In the child, before that is released.
  void close_in_child() {
    open_.store(0, std::memory_order_relaxed);
    in_use_.store(0, std::memory_order_relaxed);
    blocks_.clear();
  }

 private:
  // A longer log takes too long to evaluate.
  static constexpr std::size_t kMostEvents = std::size_t{1} << 16;

  std::atomic<std::uint64_t> open_{0};  // the number of the open log; 0: none
  std::uint64_t started_ = 0;           // the number of logs so far
  std::mutex mutex_;
  std::vector<AllocationEvent> events_;
  std::atomic<std::size_t> size_{0};           // of these
  std::unordered_set<std::uintptr_t> blocks_;  // made while a log was open, and in use
  std::atomic<std::size_t> in_use_{0};         // how many
  bool is_too_long_ = false;
  c10::DeviceIndex device_ = -1;
};

}  // namespace brim
