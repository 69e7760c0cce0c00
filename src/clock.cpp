#include "clock.h"

#include <brim/testing/clock_by_hand.h>
#include <c10/util/Exception.h>

#include <utility>

namespace brim {

std::atomic<std::int64_t> Clock::stands_at = 0;

namespace testing {

ClockByHand::ClockByHand() {
  std::int64_t by_itself = 0;
  TORCH_CHECK(
      Clock::stands_at.compare_exchange_strong(by_itself, Clock::now().time_since_epoch().count()),
      "another ClockByHand is open: there is one time for the whole process");
}

void ClockByHand::advance(std::chrono::nanoseconds by) {
  TORCH_CHECK(open_, "this ClockByHand is closed: time goes by itself");
  TORCH_CHECK_VALUE(by.count() >= 0, "time cannot go back, got ", by.count(), " ns");
  Clock::stands_at += by.count();
}

void ClockByHand::close() noexcept {
  if (std::exchange(open_, false)) {
    Clock::stands_at = 0;
  }
}

}  // namespace testing
}  // namespace brim
