#pragma once

#include <brim/export.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <vector>

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

/// A moment of a recorded step, in bytes.
struct PressureMoment {
  std::int64_t held = 0;      ///< by tensors on the device
  std::int64_t given_up = 0;  ///< what is not kept now, and would be if there were room
  std::int64_t dropped = 0;   ///< of this, what an allocation needed at this moment
  std::int64_t again = 0;     ///< what was given up, and is computed again at this moment
};

/// Runs `work` once. Each allocation is a moment, each release, and all that is given up or
/// computed again. One recording runs at a time in the process.
/// @param device where memory may be short: the CPU or CUDA
/// @throws c10::NotImplementedError on other devices, c10::Error where there are more than 65,536
///     allocations and releases, or where they are recorded already
[[nodiscard]] BRIM_API std::vector<PressureMoment> record_pressure(
    const std::function<void()>& work, c10::Device device);

}  // namespace brim::nn
