#pragma once

#include <cstdint>

namespace brim {

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

/// The limit of the thread that forked was that of the parent.
void forget_host_limit_after_fork();

}  // namespace brim
