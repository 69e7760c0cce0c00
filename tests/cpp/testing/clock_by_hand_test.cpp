#include <brim/testing/clock_by_hand.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <memory>

#include "clock.h"

namespace brim::testing {
namespace {

using std::chrono::milliseconds;

TEST(ClockByHand, TimeStandsStillButForWhatItIsTold) {
  ClockByHand clock;
  const auto begin = Clock::now();
  EXPECT_EQ(Clock::now(), begin);
  clock.advance(milliseconds(3));
  EXPECT_EQ(Clock::now() - begin, milliseconds(3));
  EXPECT_THROW(clock.advance(milliseconds(-1)), c10::ValueError);
}

TEST(ClockByHand, TimeGoesByItselfAfterwards) {
  ClockByHand clock;
  clock.close();
  const auto begin = Clock::now();
  while (Clock::now() == begin) {
  }
  EXPECT_THROW(clock.advance(milliseconds(1)), c10::Error);
}

TEST(ClockByHand, ThereIsOneAndAClosedOneEndsNoOther) {
  auto closed = std::make_unique<ClockByHand>();
  EXPECT_THROW(ClockByHand(), c10::Error);
  closed->close();
  const ClockByHand open;
  closed.reset();
  const auto begin = Clock::now();
  EXPECT_EQ(Clock::now(), begin);
}

}  // namespace
}  // namespace brim::testing
