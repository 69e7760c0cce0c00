#pragma once

#include <cstddef>
#include <cstdint>

/// All constants that weigh one choice of prediction against another, and what set them.
namespace brim::detail {

/// Errors below this are allocators' rounding: nothing is made of them. CUDA's allocator rounds to
/// 512 bytes, the CPU's to 64.
inline constexpr double kRounding = 1e-3;

/// A smaller share of a limit is not worth another run. Of 150 fitted samplers the mean batch fills
/// 85.9 % after 20.9 runs; with 0.02 it is 86.0 % after 21.2, with 0.08 85.5 % after 20.5.
inline constexpr double kWorthARun = 0.04;

/// The most by which sizes grow at once, and how far a measurement may exceed a budget for that: a
/// size that is doubled needs twice as much, or, in the length of a sample, four times.
inline constexpr double kGrowth = 2;

/// If no budget is given: a measurement should not take the last of a device's memory.
inline constexpr double kShareOfFree = 0.9;

/// Where a measurement exceeds what the others allow, one that was not made may do so by this many
/// times as much. No batch of 500 random training steps did.
inline constexpr double kTimesTheExcess = 1.5;

/// A need that is above the bound by more than this share has jumped: it is no noise.
inline constexpr double kCliff = 1;

/// The number of batches that a probe measures at most to come closer to a limit: it bounds the
/// runs. Without any, the samplers of 47 random training steps made 2,347 batches instead of 686.
inline constexpr std::size_t kMostAtTheLimit = 16;

/// The number of fits for the leave-one-out error at most: it bounds the time for many samples.
inline constexpr std::size_t kMostRefits = 16;

}  // namespace brim::detail
