#include "memory/event_log.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <utility>

namespace brim {
namespace {

// Deleters call it, where an exception would end the process.
static_assert(noexcept(std::declval<EventLog&>().note({})));

TEST(EventLog, TakesWhatHappensOnItsDeviceWhileItIsOpen) {
  EventLog log;
  log.note({.address = 1, .bytes = 10});
  const auto number = log.start(3);
  ASSERT_NE(number, 0U);
  EXPECT_EQ(log.start(3), 0U) << "is open already";
  log.note({.address = 2, .bytes = 20}, 3);
  log.note({.address = 3, .bytes = 30}, 4);
  const auto events = log.end(number);
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events[0].bytes, 20);
  log.note({.address = 4, .bytes = 40}, 3);
  EXPECT_TRUE(log.end(log.start()).empty());
}

TEST(EventLog, IsEmptyIfThereWasTooMuch) {
  EventLog log;
  const auto noted = [&](std::uintptr_t count) {
    const auto number = log.start();
    for (std::uintptr_t i = 0; i < count; ++i) {
      log.note({.address = i, .bytes = 1});
    }
    return log.end(number).size();
  };
  constexpr std::size_t kLongest = std::size_t{1} << 16;
  EXPECT_EQ(noted(kLongest), kLongest);
  EXPECT_EQ(noted(kLongest + 1), 0U);
  EXPECT_EQ(noted(1), 1U);
}

// The child may run on where the parent's log is ended, while another thread has one open.
TEST(EventLog, OfTheParentIsNotThatOfAForkedProcess) {
  EventLog log;
  const auto of_parent = log.start();
  log.note({.address = 1, .bytes = 1});
  log.close_in_child();
  EXPECT_TRUE(log.end(of_parent).empty());
  const auto of_child = log.start();
  log.note({.address = 2, .bytes = 20});
  EXPECT_TRUE(log.end(of_parent).empty());
  const auto events = log.end(of_child);
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events[0].bytes, 20);
}

}  // namespace
}  // namespace brim
