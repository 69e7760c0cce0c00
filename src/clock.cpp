#include "clock.h"

#include <brim/testing/clock_by_hand.h>

namespace brim {

std::atomic<std::int64_t> Clock::stands_at = 0;

namespace testing {

ClockByHand::ClockByHand() { Clock::stands_at = Clock::now().time_since_epoch().count(); }

void ClockByHand::advance(std::chrono::nanoseconds by) { Clock::stands_at += by.count(); }

void ClockByHand::close() noexcept { Clock::stands_at = 0; }

}  // namespace testing
}  // namespace brim
