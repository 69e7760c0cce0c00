#pragma once

#include <brim/export.h>

#include <atomic>
#include <chrono>
#include <cstdint>

namespace brim {

/// The clock that brim decides by: the steady one, or that of a testing::ClockByHand.
struct Clock {
  // NOLINTBEGIN(readability-identifier-naming): as the standard library asks of a clock
  using duration = std::chrono::nanoseconds;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<Clock>;
  static constexpr bool is_steady = true;
  // NOLINTEND(readability-identifier-naming)

  static time_point now() noexcept {
    const std::int64_t by_hand = stands_at.load(std::memory_order_relaxed);
    return time_point(by_hand > 0 ? duration(by_hand)
                                  : std::chrono::steady_clock::now().time_since_epoch());
  }

  /// Nanoseconds; 0 while time goes by itself.
  BRIM_API static std::atomic<std::int64_t> stands_at;
};

}  // namespace brim
