#pragma once

#include <brim/batching/batching.h>
#include <brim/batching/stream.h>
#include <brim/export.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace brim::batching {

/// The number of batches by a share: the first bin is from 0 % up to 5 %, the last of twenty from
/// 95 % to 100 % inclusive; one more bin has the shares above that.
using ShareHistogram = std::array<std::int64_t, 21>;

/// What becomes of the samples in one epoch, over all ranks.
struct BRIM_API PlanReport {
  std::int64_t samples = 0;  ///< the number of samples; after a position, of the remaining ones
  std::int64_t batched = 0;  ///< the number of those that are in a batch
  std::int64_t batches = 0;  ///< the number of batches, of all ranks together
  std::int64_t world_size = 1;
  double fill = 0.0;       ///< mean share of the budget that a batch uses, 0 to 1
  double padding = 0.0;    ///< share of n × longest that is padding, 0 to 1
  double imbalance = 0.0;  ///< by how much the costliest batch of a step exceeds the mean, averaged
                           ///< over steps; 0 for one rank
  ShareHistogram fill_histogram{};     ///< batches by the share of the budget that they use
  ShareHistogram padding_histogram{};  ///< batches by the share of n × longest that is padding
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
