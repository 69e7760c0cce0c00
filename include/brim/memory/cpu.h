#pragma once

#include <brim/export.h>

namespace brim {

/// Makes brim's allocator torch's CPU allocator, for the rest of the process: it counts the bytes
/// that tensors hold and can keep them under a limit. Budget, PeakMeter, testing::OomInjector and
/// adaptive calls install it when they are first used on the CPU; call this at the start of a
/// program to have every tensor counted. Importing or linking brim does not.
///
/// Tensors that exist already keep working and are not counted. Nor is memory that does not come
/// from torch's CPU allocator: `from_numpy`, shared memory, `UntypedStorage(n)`, and scratch of
/// oneDNN and MKL.
///
/// Costs some tens of nanoseconds per allocation. Thread-safe; a second call does nothing.
BRIM_API void install_cpu_allocator();

/// Whether CPU tensors are being counted.
BRIM_API bool cpu_allocator_installed();

}  // namespace brim
