#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>

namespace brim {

/// How many adaptive calls of other threads have ended so far.
std::uint64_t calls_ended_elsewhere();

/// Waits until an adaptive call of another thread has ended since calls_ended_elsewhere() was
/// `since`: that may have given memory back. False at once if there was none and no other thread is
/// in one, apart from those that wait here themselves. False also at `deadline`, and if for a
/// second those threads used no CPU time and the memory in use on `device` did not change: they
/// stand still, perhaps until this call ends.
bool wait_for_another_call(std::uint64_t since, std::chrono::steady_clock::time_point deadline,
                           c10::Device device);

/// Whether another thread is in an adaptive call and is not waiting.
bool another_call_runs();

}  // namespace brim
