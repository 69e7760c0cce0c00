#pragma once

#include <chrono>

namespace brim {

/// Waits until an adaptive call of another thread ends, which may give memory back. At once false
/// where no other thread is in one, except those that wait here themselves; false also at
/// `deadline`.
bool wait_for_another_call(std::chrono::steady_clock::time_point deadline);

/// Whether another thread is in an adaptive call and does not wait.
bool another_call_runs();

}  // namespace brim
