#include <brim/memory/host_limit.h>
#include <brim/memory/host_memory.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <utility>

#include "clock.h"
#include "fork.h"
#include "memory/backend.h"
#include "memory/host_room.h"

namespace brim {

/// In bytes that all tensors hold.
struct detail::ThreadHostLimit::Limits {
  std::int64_t limit;        // of blocks that fit what the C library kept
  std::int64_t large_limit;  // of others, which it takes from the system
  std::int64_t kept_until;   // what it kept is used up
  std::int64_t available;    // at first
  bool trimmed = false;
};

namespace {

// What is always left to libraries' workspaces, page tables and other processes.
constexpr std::int64_t kLeastReserve = std::int64_t{32} << 20;

/// What tensors can take of what is available.
std::int64_t room_within(std::int64_t available) {
  constexpr std::int64_t kShare = 32;
  return std::max<std::int64_t>(available - kLeastReserve - available / kShare, 0);
}

/// Bytes that may be allocated before the machine is asked again: blocks take more than the bytes
/// that were asked for, up to three times as much, and libraries allocate on their own.
std::int64_t recheck_interval(std::int64_t available) {
  constexpr std::int64_t kLeast = std::int64_t{256} << 10;
  constexpr std::int64_t kShare = 16;
  return std::max(available / kShare, kLeast);
}

/// What the machine can give and what the C library keeps.
///
/// Freed blocks may stay with the process for later tensors (mimalloc, which torch uses on ARM,
/// keeps nearly all of them): from outside they look used. The resident set beyond the tensors is
/// split into such blocks and all else by when it grew: during attempts by tensors, between them by
/// something else.
class HostReading {
 public:
  std::mutex mutex;

  void in_forked_child() {
    at_ = {};
    most_held_ = 0;
  }

  struct Room {
    std::int64_t available = 0;  // of the machine
    std::int64_t kept = 0;       // by the C library, for tensors
  };

  /// Of the last 50 ms, unless much was allocated since.
  Room recent(std::int64_t allocated, bool between_attempts) {
    constexpr auto kFresh = std::chrono::milliseconds(50);
    const std::lock_guard lock(mutex);
    if (at_ == Clock::time_point{} || Clock::now() - at_ > kFresh ||
        std::abs(allocated - allocated_) > recheck_interval(available_)) {
      read(allocated, between_attempts);
    }
    const Room then = room(allocated_);
    const std::int64_t more = allocated - allocated_;
    return {std::max<std::int64_t>(then.available - more, 0), then.kept};
  }

  /// Tensors are about to hold this many bytes.
  void note_held(std::int64_t bytes) {
    const std::lock_guard lock(mutex);
    most_held_ = std::max(most_held_, bytes);
  }

  Room now(std::int64_t allocated) {
    const std::lock_guard lock(mutex);
    read(allocated, false);
    return room(allocated);
  }

 private:
  void read(std::int64_t allocated, bool between_attempts) {
    const HostMemory host = read_host_memory();
    const std::int64_t beyond = host.resident - allocated;
    if (at_ == Clock::time_point{}) {
      other_ = beyond;
    } else if (between_attempts) {
      other_ += std::max<std::int64_t>(beyond - (resident_ - allocated_), 0);
    }
    at_ = Clock::now();
    available_ = host.available();
    resident_ = host.resident;
    allocated_ = allocated;
  }

  Room room(std::int64_t allocated) const {
    constexpr std::int64_t kMostPerByte = 4;  // blocks that tensors still hold are rounded up too
    const std::int64_t most = kMostPerByte * std::max<std::int64_t>(most_held_ - allocated, 0);
    return {available_, std::clamp<std::int64_t>(resident_ - allocated_ - other_, 0, most)};
  }

  Clock::time_point at_{};
  std::int64_t available_ = 0;
  std::int64_t resident_ = 0;
  std::int64_t allocated_ = 0;  // then, by tensors
  std::int64_t most_held_ = 0;  // by tensors
  std::int64_t other_ = 0;      // of the resident set: no tensors and nothing kept for them
};

HostReading& last_reading() { return shared_object<HostReading>(); }

using detail::ThreadHostLimit;
using Limits = ThreadHostLimit::Limits;

// Small, with the rest on the heap: glibc has some eighty bytes for fast access to all thread-local
// variables of this library beside torch's. If they were larger, each access would take 4 ns more,
// and a call that fits has two.
constinit thread_local ThreadHostLimit this_thread;

/// What the machine has now, for a request of this thread.
std::int64_t ask(ThreadHostLimit& thread, std::int64_t allocated) {
  if (thread.limits == nullptr) {
    const auto room = last_reading().recent(allocated, true);
    const std::int64_t kept_until = allocated + room.kept;
    thread.limits = new Limits{.limit = kept_until + room_within(room.available),
                               .large_limit = allocated + room_within(room.available),
                               .kept_until = kept_until,
                               .available = room.available};
    return room.available;
  }
  Limits& own = *thread.limits;
  // Never raised during an attempt: the system does not count pages that were allocated and not
  // yet written to, so a later reading would promise them twice.
  const std::int64_t available = last_reading().now(allocated).available;
  own.limit = std::min(own.limit, std::max(allocated, own.kept_until) + room_within(available));
  own.large_limit = std::min(own.large_limit, allocated + room_within(available));
  // Blocks took more than their bytes. What was kept may be used even if hardly anything is left
  // beside it, but no attempt takes more than a part of that.
  constexpr std::int64_t kUntouchable = kLeastReserve / 4;
  const std::int64_t tolerated = std::max<std::int64_t>(own.available - kUntouchable, 0) / 4;
  if (available < kLeastReserve && own.available - available > tolerated) {
    own.limit = std::min(own.limit, allocated);
  }
  return available;
}

/// Bytes that the C library had kept for later and has now given back to the system.
std::int64_t trim() {
  const std::int64_t before = read_host_memory().available();
  cpu_backend().release_cached(c10::DeviceType::CPU);
  return std::max<std::int64_t>(read_host_memory().available() - before, 0);
}

}  // namespace

std::int64_t recent_host_room(std::int64_t allocated) {
  const auto room = last_reading().recent(allocated, false);
  return room_within(room.available) + room.kept;
}

std::int64_t refused_by_host(std::int64_t bytes, std::int64_t allocated) {
  ThreadHostLimit& thread = this_thread;
  if (thread.open == 0 || bytes <= thread.recheck_above - allocated) [[likely]] {
    return CpuAllocator::kUnlimited;
  }
  const std::int64_t available = ask(thread, allocated);
  Limits& own = *thread.limits;
  constexpr std::int64_t kLarge = std::int64_t{4} << 20;
  const std::int64_t& limit = bytes < kLarge ? own.limit : own.large_limit;
  if (bytes > limit - allocated && !own.trimmed) {
    own.trimmed = true;
    const std::int64_t more = trim();
    own.limit += more;
    own.large_limit += more;
  }
  if (bytes > limit - allocated) {
    return limit;
  }
  last_reading().note_held(allocated + bytes);
  thread.recheck_above = std::min(limit, allocated + bytes + recheck_interval(available));
  return CpuAllocator::kUnlimited;
}

ThreadHostLimit& detail::host_limit_of_thread() { return this_thread; }

void detail::forget(ThreadHostLimit& own) noexcept { delete std::exchange(own.limits, nullptr); }

HostLimit::HostLimit(State state) : HostLimit(state, this_thread) {}

void HostLimit::begin_attempt() noexcept { detail::begin(this_thread); }

}  // namespace brim
