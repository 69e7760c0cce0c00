#pragma once

#include <brim/export.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <string>

namespace brim {

/// Memory of one device as this process sees it, in bytes unless a comment says otherwise.
struct MemoryStats {
  /// Held by tensors. On the CPU: since the counting allocator was installed.
  std::int64_t allocated = 0;
  /// The most of that so far, or since reset_peak.
  std::int64_t peak = 0;
  /// Taken from the system: torch's cache of an accelerator, the resident set (RSS) on the CPU.
  std::int64_t reserved = 0;
  /// The least of what the device has and the budget; on the CPU of RAM, cgroup, RLIMIT_AS and
  /// budget.
  std::int64_t limit = 0;
  /// What can still be allocated before a limit is reached; an accelerator's cached blocks
  /// included.
  std::int64_t free = 0;
  /// What torch's cache may take from the device: `allocated` and `free`, and more under a budget
  /// on CUDA, which limits what is allocated.
  std::int64_t reservable = 0;
  /// Cached by torch, but stuck beside a live block; 0 on the CPU.
  std::int64_t inactive_split = 0;
  /// The number of times that torch flushed its cache to make room; 0 on the CPU.
  std::int64_t alloc_retries = 0;
  /// The number of out-of-memory errors of torch's allocator and of budgets; 0 on the CPU.
  std::int64_t ooms = 0;
};

/// The memory of `device` now. On the CPU, `allocated` and `peak` are 0 until the counting
/// allocator is installed (see brim/memory/cpu.h); asking does not install it.
///
/// Thread-safe. Costs about a microsecond for an accelerator, and tens on the CPU, where limits are
/// read from files.
/// @throws c10::ValueError if `device` has no memory of its own (meta) or does not exist.
BRIM_API MemoryStats memory_stats(c10::Device device);

/// Starts `memory_stats(device).peak` again from the bytes held now. Open PeakMeters keep theirs.
BRIM_API void reset_peak(c10::Device device);

/// The default device: the current accelerator where there is one, else the CPU.
BRIM_API c10::Device default_device();

/// `device` with its index filled in (the current one where none is given), checked to exist.
/// @throws c10::ValueError if it does not, or has no memory of its own.
BRIM_API c10::Device resolve_device(c10::Device device);

/// Several lines for people: one figure per line, with units.
BRIM_API std::string to_string(const MemoryStats& stats);

}  // namespace brim
