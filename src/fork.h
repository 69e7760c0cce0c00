#pragma once

#include <mutex>

namespace brim {

/// Whether this process was forked, since libbrim was loaded, from another one.
bool is_forked_child() noexcept;

/// Whether torch had begun to use an accelerator before that fork. Its driver refuses to work in
/// the child.
bool forked_with_accelerator() noexcept;

/// Holds `mutex` during every fork from now on, so that in a child it is neither locked by a thread
/// that does not exist there nor in the middle of a change. `in_child` then runs in the child, with
/// the lock held. Both must live as long as the process. No thread may hold one such lock while it
/// takes another.
void hold_during_fork(std::mutex& mutex, void (*in_child)() = nullptr);

/// The one Object of the process, never destroyed: what uses it may do so until the very end. Its
/// `mutex` is held during every fork, and its `in_forked_child()`, if it has one, then runs in the
/// child.
template <class Object>
Object& shared_object() {
  static Object* const instance = [] {
    auto* const made = new Object;
    if constexpr (requires { made->in_forked_child(); }) {
      hold_during_fork(made->mutex, [] { shared_object<Object>().in_forked_child(); });
    } else {
      hold_during_fork(made->mutex);
    }
    return made;
  }();
  return *instance;
}

}  // namespace brim
