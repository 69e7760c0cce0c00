#pragma once

#include <brim/export.h>

#include <cstdint>

namespace brim::nn {

/// What was given up for want of memory by layers that keep values only while there is room
/// (`Recompute::automatic`), on all devices, since the process began or the last reset_pressure().
struct Pressure {
  std::int64_t values = 0;         ///< how many can be given up now
  std::int64_t value_bytes = 0;    ///< the bytes of these; memory that others hold, too, counts
  std::int64_t requests = 0;       ///< allocations that were served only because values went
  std::int64_t dropped = 0;        ///< values that went, for such a request
  std::int64_t dropped_bytes = 0;  ///< bytes that this freed
  std::int64_t foreseen = 0;       ///< values that were not kept, because such a step needed it
  std::int64_t foreseen_bytes = 0;
  std::int64_t recomputed = 0;  ///< values that backward computed again, without those of blocks
  std::int64_t blocks = 0;      ///< blocks of layers that ran again as a whole
  double seconds = 0;           ///< that both took; on accelerators of what they have done by now
};

/// Thread-safe.
[[nodiscard]] BRIM_API Pressure pressure();

/// Counts from zero again, and forgets what steps needed.
BRIM_API void reset_pressure();

}  // namespace brim::nn
