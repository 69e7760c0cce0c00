#pragma once

#include <brim/export.h>
#include <brim/memory/stats.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace brim {

/// Gives memory that no tensor uses back: torch's cache of an accelerator, on the CPU the C
/// library's free lists.
/// @returns by how many bytes `memory_stats(device).reserved` fell (0 if it did not).
/// Takes milliseconds and makes the next allocations slower: for after a failure, not for every
/// step.
BRIM_API std::int64_t release_cached(c10::Device device);

/// How much of a device's memory is reserved by torch's cache but held by no tensor.
struct Fragmentation {
  std::int64_t cached = 0;  ///< SUM: reserved minus allocated, bytes.
  std::int64_t stuck = 0;   ///< SUM: the part of it in blocks that share a segment with a live
                            ///< tensor: cannot be released.
  double share = 0.0;       ///< `cached` as a share of what is reserved, 0 to 1.
  std::int64_t usable = 0;  ///< SIZE: what could be allocated if every free byte were in one piece.

  /// Whether a request of `requested` bytes that has just failed was kept out by fragmentation: it
  /// needed less than what was free in all. Releasing the cache and trying again may cure it when
  /// `cached` exceeds `stuck`.
  bool explains_failure_of(std::int64_t requested) const {
    return requested > 0 && requested <= usable;
  }
};

/// Worked out from `stats`, of an accelerator; a CPU has no cache of torch's and gives zeros (but
/// for `usable`).
BRIM_API Fragmentation fragmentation(c10::Device device);

}  // namespace brim
