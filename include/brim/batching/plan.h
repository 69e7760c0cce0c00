#pragma once

#include <brim/batching/batching.h>
#include <brim/batching/stream.h>
#include <brim/export.h>

#include <cstdint>
#include <string>
#include <vector>

namespace brim::batching {

/// What becomes of the samples in one epoch, over all ranks.
struct BRIM_API PlanReport {
  std::int64_t samples = 0;  ///< COUNT of samples; after a position, of the remaining ones
  std::int64_t batched = 0;  ///< COUNT of those that are in a batch
  std::int64_t batches = 0;  ///< COUNT of batches, of all ranks together
  std::int64_t world_size = 1;
  double fill = 0.0;       ///< mean share of the budget that a batch uses, 0 to 1
  double padding = 0.0;    ///< share of n × longest that is padding, 0 to 1
  double imbalance = 0.0;  ///< by how much the costliest batch of a step exceeds the mean, averaged
                           ///< over steps; 0 for one rank
  std::vector<LeftOut> left_out;
};

/// Reads a whole epoch, or the rest of it after a position, and reports. Makes all its batches.
/// @throws std::invalid_argument as BatchStream::seek.
[[nodiscard]] BRIM_API PlanReport report(const Batching& batching, std::uint64_t seed,
                                         std::int64_t world_size = 1, const Position& from = {});

/// A few lines for people.
[[nodiscard]] BRIM_API std::string to_string(const PlanReport& report);

/// "over budget", "outside buckets", "dropped last", "too few for ranks".
[[nodiscard]] BRIM_API const char* to_string(LeftOutReason reason);

}  // namespace brim::batching
