#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <vector>

namespace brim {

/// Asked before each allocation; a refusal makes it fail as if memory were exhausted.
class AllocationGate {
 public:
  virtual bool admit(std::size_t bytes) noexcept = 0;

 protected:
  ~AllocationGate() = default;
};

/// Those of one allocator. Thread-safe.
class AllocationGates {
 public:
  void add(AllocationGate& gate) {
    const std::lock_guard lock(mutex_);
    gates_.push_back(&gate);
    count_.fetch_add(1, std::memory_order_relaxed);
  }

  void remove(AllocationGate& gate) noexcept {
    const std::lock_guard lock(mutex_);
    count_.fetch_sub(static_cast<int>(std::erase(gates_, &gate)), std::memory_order_relaxed);
  }

  /// Without the lock where there is none.
  [[nodiscard]] bool admit(std::size_t bytes) {
    return count_.load(std::memory_order_relaxed) == 0 || all_admit(bytes);
  }

  /// For fork().
  [[nodiscard]] std::mutex& mutex() { return mutex_; }

 private:
  bool all_admit(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    bool admitted = true;
    for (AllocationGate* gate : gates_) {
      admitted = gate->admit(bytes) && admitted;  // every gate counts every allocation
    }
    return admitted;
  }

  std::atomic<int> count_{0};
  std::mutex mutex_;
  std::vector<AllocationGate*> gates_;
};

}  // namespace brim
