#pragma once

#include <cstdint>

/// All constants of the search, and what set them.
namespace brim::search {

// Free memory fluctuates: less than this is no change of known bytes, less than that of unknown
// ones.
constexpr double kSameBytes = 1.001;
constexpr double kClearly = 1.1;
// A failure that held and asked for less than this share of what was available had another cause.
constexpr double kExplained = 0.5;
// After this many fits, a call in parts retries a size whose failure was doubtful.
constexpr int kFitsToLift = 3;

// The growth is known if two sizes show it for this share of the bytes. Else the next size is at
// most so much larger than the last.
constexpr double kMostlyKnown = 0.5;
constexpr double kStepUnknown = 1.5;
// Where even that may not fit, a size larger by this part shows how the need grows.
constexpr double kLearningPart = 16;
// Of a step up, this part is left for the next call: padded sizes and small tensors are not seen.
constexpr std::int64_t kReservedPart = 32;
// After so many failures that were not foreseen, only the bracket counts.
constexpr int kMostUnforeseen = 2;

// What was traced on fake tensors may lack this share of what the work takes: some kernels need a
// little that no trace shows (within 0.3 % in 30 of 40 training steps on an H200).
constexpr double kForeseenMargin = 0.01;

// What CUDA's allocator takes from the device at once for tensors below 10 MiB: as much may be out
// of reach at the end. Of little memory, no more than this share.
constexpr double kSegment = 20.0 * (1 << 20);
constexpr double kLargestSegmentShare = 1.0 / 16;
// A gain below this is not worth another size: the allocator would need new segments for it, and it
// may be less than a step of padded sizes. Between parts of one call less is worth it, but after
// many moves no more than the third, which bounds their number.
constexpr double kWorthMoving = 1.0 / 100;
constexpr double kWorthMovingInParts = 1.0 / 200;
constexpr double kWorthMovingLate = 1.0 / 8;

// Of a size that a failure suggests, this share is left for small tensors.
constexpr double kGuessMargin = 1.0 / 64;

// The first part of a range is this share of its upper bound, and until the growth is known each
// next one is at most so much larger.
constexpr double kProbeShare = 64;
constexpr double kProbeGrowth = 16;
// What parts keep free: results pile up beside them.
constexpr double kProbeMargin = 0.015;

}  // namespace brim::search
