#pragma once

#include <brim/export.h>

#include <chrono>

namespace brim::testing {

/// For tests of what depends on time: while it lives, the clock that brim measures by stands still
/// in the whole process, but for what `advance` is told. Waiting for other threads and ranks goes
/// by real time.
///
///     brim::testing::ClockByHand clock;
///     brim::batch(64, [&](std::int64_t size) { clock.advance(std::chrono::milliseconds(size)); },
///                 {.objective = brim::Objective::throughput});
class BRIM_API ClockByHand {
 public:
  /// @throws c10::Error where another one lives.
  ClockByHand();
  ~ClockByHand() { close(); }
  ClockByHand(const ClockByHand&) = delete;
  ClockByHand& operator=(const ClockByHand&) = delete;

  /// @throws c10::ValueError if `by` is negative; c10::Error after `close`.
  void advance(std::chrono::nanoseconds by);
  /// Lets time go by itself again.
  void close() noexcept;

 private:
  bool open_ = true;
};

}  // namespace brim::testing
