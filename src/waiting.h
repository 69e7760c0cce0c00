#pragma once

#include <brim/runtime.h>

#include <mutex>

namespace brim {

/// Whether set_waiter was given one.
bool has_waiter() noexcept;

/// Runs `wait`, which may block, in the Waiter that was set: without Python's GIL.
template <class Wait>
void waiting(const Wait& wait) {
  run_waiting([](const void* context) { (*static_cast<const Wait*>(context))(); }, &wait);
}

/// Runs `work` under `mutex`. If the mutex must be waited for, `work` runs inside the wait: holding
/// it while taking Python's GIL again would deadlock with a thread that has the GIL and wants it.
template <class Work>
void with_lock(std::mutex& mutex, const Work& work) {
  if (!has_waiter()) {
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
