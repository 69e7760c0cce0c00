#pragma once

#include <cstddef>
#include <cstdint>

#include "predict/predict_constants.h"

/// All constants that weigh one choice of a fit against another, and what set them.
namespace brim::detail {

/// The number of epochs whose batches are looked at, and of samples that are read for that at most:
/// they take half a second.
inline constexpr std::size_t kEpochs = 4;
inline constexpr std::size_t kMostRead = 200'000;

/// The number of a batching's own batches that are measured at most: it bounds the runs, of which
/// 500 random training steps take 20 in the mean.
inline constexpr std::size_t kMostMeasured = 32;

/// Of padded batches, this many of all lengths are measured, beside the extreme ones.
inline constexpr std::size_t kOfAllLengths = 8;

/// Of batches under a total, this many with the highest bounds are measured.
inline constexpr std::size_t kHighest = 4;

/// The needs of batches of like sizes differ by this share, depending on the order of samples.
inline constexpr double kSpread = 0.005;

/// The number of samples in a batch that is measured at most.
inline constexpr std::size_t kMostInABatch = std::size_t{1} << 16;

/// Lengths that represent all for the model's first batches, evenly spread in two ways.
inline constexpr std::size_t kLengths = 32;

/// One sample in this many has most of a feature: enough for batches that are not all alike.
inline constexpr std::size_t kGroups = 16;

/// What an allocator loses between blocks: only batches above this share of the fullest one
/// matter, of which a dozen run in turn, and at most so many in all.
inline constexpr double kNearlyFull = 0.7;
inline constexpr std::size_t kInTurn = 12;
inline constexpr int kMostRuns = 100;

}  // namespace brim::detail
