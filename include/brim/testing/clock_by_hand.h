#pragma once

#include <brim/export.h>

#include <chrono>

namespace brim::testing {

/// For tests of what depends on time: while it lives, the clock that brim decides by stands still in
/// the whole process, but for what `advance` is told. One at a time.
///
///     const brim::testing::ClockByHand clock;
///     brim::batch(64, [](std::int64_t size) { clock.advance(std::chrono::milliseconds(size)); },
///                 {.objective = brim::Objective::throughput});
class BRIM_API ClockByHand {
 public:
  ClockByHand();
  ~ClockByHand() { close(); }
  ClockByHand(const ClockByHand&) = delete;
  ClockByHand& operator=(const ClockByHand&) = delete;

  static void advance(std::chrono::nanoseconds by);
  /// Lets time go by itself again.
  static void close() noexcept;
};

}  // namespace brim::testing
