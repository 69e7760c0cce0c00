#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>

namespace brim {

/// How many adaptive calls of other threads have ended so far.
std::uint64_t calls_ended_elsewhere();

/// Waits until an adaptive call of another thread has ended, which may give memory back, since
/// calls_ended_elsewhere() was `since`. At once false where none has and no other thread is in one,
/// except those that wait here themselves; false also at `deadline`, and where for a second those
/// threads used no CPU time and the memory in use on `device` did not change: they stand still,
/// perhaps until this call ends.
bool wait_for_another_call(std::uint64_t since, std::chrono::steady_clock::time_point deadline,
                           c10::Device device);

/// Whether another thread is in an adaptive call and does not wait.
bool another_call_runs();

}  // namespace brim
