#pragma once

#include <brim/export.h>

#include <utility>

namespace brim {

/// While one is open on a thread, CPU tensors that this thread allocates must fit what the machine,
/// its cgroups and RLIMIT_AS have left; an allocation that does not throws c10::OutOfMemoryError.
/// Without it Linux promises memory that it does not have, and kills the process that uses it.
///
/// Opening one installs the counting allocator (see brim/memory/cpu.h); where another allocator is
/// in its way, nothing is checked. The machine is asked when the tensors in use have grown by a
/// mebibyte, and again whenever they have grown by a sixteenth of what was left. So an attempt that
/// stays small costs some nanoseconds per allocation; one that takes little of what is free a tenth
/// of a microsecond more, because the first answer may be 50 ms old; and one that fills the machine
/// some milliseconds.
///
/// Belongs to its thread; may be nested. Allocations of other threads count, but are not refused.
class BRIM_API HostLimit {
 public:
  enum class State : bool { closed, open };

  explicit HostLimit(State state);
  ~HostLimit();
  HostLimit(HostLimit&& other) noexcept : open_(std::exchange(other.open_, false)) {}
  HostLimit& operator=(HostLimit&& other) noexcept {
    std::swap(open_, other.open_);
    return *this;
  }

  /// Asks the machine again: what was held has been released, or others have taken memory.
  static void begin_attempt() noexcept;

 private:
  bool open_ = false;
};

}  // namespace brim
