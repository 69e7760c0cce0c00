#pragma once

#include <brim/export.h>

namespace brim {

/// Makes brim's allocator torch's CPU allocator, for the rest of the process: it counts the bytes
/// that tensors hold and can keep them under a limit. Budget, PeakMeter and testing::OomInjector do
/// this by themselves when they are first used on the CPU; call it at the start of a program to
/// have every tensor counted. Importing or linking brim alone does not.
///
/// Tensors that exist already keep working and are not counted. Nor is memory that torch does not
/// ask its CPU allocator for: `from_numpy`, shared memory, `UntypedStorage(n)`, and scratch of
/// oneDNN and MKL.
///
/// Costs some tens of nanoseconds an allocation. Thread-safe, and a second call does nothing.
BRIM_API void install_cpu_allocator();

BRIM_API bool cpu_allocator_installed();

}  // namespace brim
