#pragma once

#include <brim/export.h>

#include <cstdint>

namespace brim {
namespace detail {

/// The open limits of one thread.
struct ThreadHostLimit {
  /// Worked out in an attempt that has asked the machine.
  struct Limits;

  int open = 0;                    ///< how many there are
  std::int64_t recheck_above = 0;  ///< bytes in all tensors, beyond which the machine is asked
  Limits* limits = nullptr;        ///< owned; null as long as this attempt has not asked
};

}  // namespace detail

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
  ~HostLimit() {
    if (own_ != nullptr && --own_->open == 0 && own_->limits != nullptr) {
      begin_attempt();
    }
  }
  HostLimit(const HostLimit&) = delete;
  HostLimit& operator=(const HostLimit&) = delete;

  /// Asks the machine again: what was held has been released, or others have taken memory.
  static void begin_attempt() noexcept;

 private:
  friend class RunningCall;  // which inlines it
  HostLimit(State state, detail::ThreadHostLimit& own);

  detail::ThreadHostLimit* own_ = nullptr;  // of this thread; null where this one is closed
};

}  // namespace brim
