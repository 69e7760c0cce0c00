#pragma once

#include <brim/export.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <string>

namespace brim {

/// Memory of one device as this process sees it, in bytes unless said otherwise.
///
/// | field            | CPU                                                    | accelerator | |
/// ---------------- | ------------------------------------------------------ |
/// ----------------------------------------- | | allocated        | held by tensors since the
/// allocator was installed      | held by tensors                           | | peak             |
/// the most of that so far (see reset_peak)               | the same | | reserved         |
/// resident set of the process (RSS)                      | taken from the device by torch's cache
/// | | limit            | least of RAM, cgroup, RLIMIT_AS and the budget         | least of the
/// device's memory and budget   | | free             | what can still be allocated before a limit
/// is reached  | the same, cached blocks included          | | inactive_split   | 0 | cached, but
/// stuck beside a live block     | | alloc_retries    | 0 | COUNT of cache flushes to make room |
/// | ooms             | 0                                                      | COUNT of
/// out-of-memory errors             |
struct MemoryStats {
  std::int64_t allocated = 0;
  std::int64_t peak = 0;
  std::int64_t reserved = 0;
  std::int64_t limit = 0;
  std::int64_t free = 0;
  std::int64_t inactive_split = 0;
  std::int64_t alloc_retries = 0;
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

/// The device that is meant when none is named: the current accelerator where there is one, else
/// the CPU.
BRIM_API c10::Device default_device();

/// `device` with its index filled in (the current one where none is given), checked to exist.
/// @throws c10::ValueError if it does not, or has no memory of its own.
BRIM_API c10::Device resolve_device(c10::Device device);

/// Several lines for people: one figure a line, with units.
BRIM_API std::string to_string(const MemoryStats& stats);

}  // namespace brim
