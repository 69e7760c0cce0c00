#include "fork.h"

#include <pthread.h>

#include "memory/backend.h"

namespace brim {
namespace {

// Written by the only thread of a process that has just begun.
bool forked = false;
bool with_accelerator = false;

// Whether it is in use is asked before the fork: the child must not call what may take a lock.
bool in_use = false;

void before_fork() { in_use = accelerator_initialized(); }

void in_child() {
  forked = true;
  with_accelerator = with_accelerator || in_use;
}

[[maybe_unused]] const int kRegistered = pthread_atfork(&before_fork, nullptr, &in_child);

}  // namespace

bool is_forked_child() noexcept { return forked; }

bool forked_with_accelerator() noexcept { return with_accelerator; }

}  // namespace brim
