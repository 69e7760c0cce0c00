#pragma once

#include <brim/export.h>
#include <brim/predict/allocator_model.h>
#include <brim/predict/memory_trace.h>

#include <cstdint>
#include <optional>

namespace brim {

/// A trace of work at some size.
struct SizedTrace {
  const MemoryTrace& trace;
  std::int64_t size = 0;
  std::int64_t start = 0;  ///< the event at which the work starts
};

/// What the trace would be at another size, if each of its allocations grows as it did from `other`
/// to here. What was held before the work stays as it is. Empty if the two traces do not consist of
/// the same allocations and frees.
/// @throws std::invalid_argument if the sizes are the same or one is not positive.
BRIM_API std::optional<MemoryTrace> scaled(const SizedTrace& trace, const SizedTrace& other,
                                           std::int64_t size);

/// The largest size within [low, high] at which the scaled trace fits the capacity. It looks down
/// from the largest whose bytes do, in steps of a quarter of a percent, because blocks may pack at
/// one size and not at a smaller one; the size after the result does not fit. `low - 1` if none
/// fits; empty if the traces differ.
/// @throws std::invalid_argument as scaled() does, and if high is below low or low below 1.
BRIM_API std::optional<std::int64_t> largest_scaled(const SizedTrace& trace,
                                                    const SizedTrace& other,
                                                    const AllocatorOptions& options,
                                                    std::int64_t low, std::int64_t high);

}  // namespace brim
