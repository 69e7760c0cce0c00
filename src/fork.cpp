#include "fork.h"

#include <pthread.h>

#include <vector>

#include "memory/backend.h"

namespace brim {
namespace {

struct Held {
  std::mutex* mutex;
  void (*in_child)();
};

struct ForkState {
  std::mutex mutex;
  std::vector<Held> held;
  // Whether it is in use is asked before the fork: a child must not call what may take a lock.
  bool accelerator_in_use = false;
  bool forked = false;
  bool forked_with_accelerator = false;
};

ForkState& fork_state() {
  static auto* const state = new ForkState;
  return *state;
}

void before_fork() {
  ForkState& state = fork_state();
  const bool in_use = accelerator_initialized();
  state.mutex.lock();
  state.accelerator_in_use = in_use;
  for (const Held& each : state.held) {
    each.mutex->lock();
  }
}

void unlock_all(ForkState& state) {
  for (const Held& each : state.held) {
    each.mutex->unlock();
  }
  state.mutex.unlock();
}

void in_parent() { unlock_all(fork_state()); }

void in_child() {
  ForkState& state = fork_state();
  state.forked = true;
  state.forked_with_accelerator = state.forked_with_accelerator || state.accelerator_in_use;
  for (const Held& each : state.held) {
    if (each.in_child != nullptr) {
      each.in_child();
    }
  }
  unlock_all(state);
}

[[maybe_unused]] const int kRegistered = pthread_atfork(&before_fork, &in_parent, &in_child);

}  // namespace

bool is_forked_child() noexcept { return fork_state().forked; }

bool forked_with_accelerator() noexcept { return fork_state().forked_with_accelerator; }

void hold_during_fork(std::mutex& mutex, void (*in_child)()) {
  ForkState& state = fork_state();
  const std::lock_guard lock(state.mutex);
  state.held.push_back({&mutex, in_child});
}

}  // namespace brim
