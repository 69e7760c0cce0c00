#pragma once

#include <mutex>

namespace brim {

/// Whether this process was forked, since libbrim was loaded, from another one.
bool is_forked_child() noexcept;

/// Whether torch had begun to use an accelerator before that fork. Its driver refuses to work in
/// the child.
bool forked_with_accelerator() noexcept;

/// Holds `mutex` during every fork from now on, so that a child finds neither the lock of a thread
/// that it does not have nor half of a change. `in_child` then runs there, with the lock held.
/// Neither is ever let go. No thread may hold one such lock and ask for another.
void hold_during_fork(std::mutex& mutex, void (*in_child)() = nullptr);

}  // namespace brim
