#pragma once

#include <brim/runtime.h>

#include <atomic>
#include <mutex>

namespace brim {

inline constinit std::atomic<Waiter> current_waiter{nullptr};
inline constinit std::atomic<InterruptCheck> current_interrupt_check{nullptr};

inline void throw_if_interrupted() {
  if (const InterruptCheck check = current_interrupt_check.load()) {
    check();
  }
}

/// Runs `wait`, which may block, in the Waiter that was set: without Python's GIL.
template <class Wait>
void waiting(const Wait& wait) {
  run_waiting([](const void* context) { (*static_cast<const Wait*>(context))(); }, &wait);
}

/// Runs `work` under `mutex`. If the mutex must be waited for, `work` runs inside the wait: holding
/// it while taking Python's GIL again would deadlock with a thread that has the GIL and wants it.
template <class Work>
[[gnu::always_inline]] inline void with_lock(std::mutex& mutex, const Work& work) {
  if (current_waiter.load(std::memory_order_relaxed) == nullptr) [[likely]] {
    const std::lock_guard lock(mutex);  // half of try_lock's time in a process of one thread
    work();
  } else if (const std::unique_lock lock(mutex, std::try_to_lock); lock) {
    work();
  } else {
    waiting([&] {
      const std::lock_guard waited(mutex);
      work();
    });
  }
}

}  // namespace brim
