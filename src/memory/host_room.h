#pragma once

#include <brim/memory/host_limit.h>

#include <cstdint>

#include "memory/cpu_allocator.h"

namespace brim {
namespace detail {

ThreadHostLimit& host_limit_of_thread();

/// Deletes the limits that an attempt has worked out.
void forget(ThreadHostLimit& own) noexcept;

/// Before an attempt.
inline void begin(ThreadHostLimit& own) noexcept {
  if (own.limits != nullptr) [[unlikely]] {
    forget(own);
  }
  constexpr std::int64_t kSmall = std::int64_t{1} << 20;
  own.recheck_above = CpuAllocator::allocated() + kSmall;
}

}  // namespace detail

// Inline, for a call that fits.
inline HostLimit::HostLimit(State state, detail::ThreadHostLimit& own) {
  if (state == State::open && CpuAllocator::try_install()) [[likely]] {
    own_ = &own;
    ++own.open;
    detail::begin(own);
  }
}

/// Bytes of CPU memory that tensors can still take before the system would have to kill someone:
/// what is available, less a small reserve for what torch's allocator does not see. Read from the
/// system at most every 50 ms unless much was allocated since, because that takes several files. In
/// between, tensors allocated or freed since the last reading are accounted for.
/// @param allocated bytes that tensors hold now.
std::int64_t recent_host_room(std::int64_t allocated);

/// Asked before each CPU allocation. The most bytes that tensors may hold, if an open HostLimit of
/// this thread refuses it; else CpuAllocator::kUnlimited. (Not an optional: copying that costs an
/// allocation 5 ns on Arm.)
/// @param allocated bytes that tensors hold now.
std::int64_t refused_by_host(std::int64_t bytes, std::int64_t allocated);

}  // namespace brim
