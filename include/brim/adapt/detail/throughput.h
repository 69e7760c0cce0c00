#pragma once

#include <brim/export.h>
#include <brim/need/attempt.h>

#include <cstdint>
#include <span>

namespace brim {

/// For Objective::throughput: the size to try next, given what fits and how fast the sizes tried so
/// far were.
///
/// Starts at `largest`, the largest size that fits, and halves as long as the rate stays within 2 %
/// of the best one seen; from then on it is the smallest size that does. Pure logic; failures,
/// attempts without a rate, and sizes that are above `largest`, below `lower` or no multiple
/// of `quantum` do not count.
BRIM_API std::int64_t throughput_choice(std::span<const Attempt> attempts, std::int64_t largest,
                                        std::int64_t lower, std::int64_t quantum);

}  // namespace brim
