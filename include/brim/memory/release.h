#pragma once

#include <brim/export.h>
#include <brim/memory/stats.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace brim {

/// Gives unused memory back to the system: torch's cache on an accelerator, the C library's free
/// lists on the CPU.
/// @returns by how many bytes `memory_stats(device).reserved` fell (0 if it did not).
/// Takes milliseconds and slows the next allocations down: call it after a failure, not every step.
BRIM_API std::int64_t release_cached(c10::Device device);

/// How much of a device's memory is reserved by torch's cache but held by no tensor.
struct Fragmentation {
  std::int64_t cached = 0;  ///< bytes reserved minus allocated
  std::int64_t stuck = 0;   ///< bytes of these that share a segment with a live tensor
  double share = 0.0;       ///< `cached` as a share of what is reserved, 0 to 1.
  std::int64_t usable = 0;  ///< bytes that could be allocated if every free one were in one piece

  /// Whether fragmentation made a request of `requested` bytes fail: it needed less than what was
  /// free in total. Releasing the cache and retrying may help when `cached` exceeds `stuck`, which
  /// cannot be released.
  bool explains_failure_of(std::int64_t requested) const {
    return requested > 0 && requested <= usable;
  }
};

/// Of an accelerator. torch keeps no cache on the CPU: there, all but `usable` is 0.
BRIM_API Fragmentation fragmentation(c10::Device device);

}  // namespace brim
