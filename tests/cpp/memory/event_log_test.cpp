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
  ASSERT_TRUE(log.start(3));
  EXPECT_FALSE(log.start(3)) << "is open already";
  log.note({.address = 2, .bytes = 20}, 3);
  log.note({.address = 3, .bytes = 30}, 4);
  const auto events = log.end();
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events[0].bytes, 20);
  log.note({.address = 4, .bytes = 40}, 3);
  ASSERT_TRUE(log.start());
  EXPECT_TRUE(log.end().empty());
}

TEST(EventLog, IsEmptyIfThereWasTooMuch) {
  EventLog log;
  ASSERT_TRUE(log.start());
  for (std::uintptr_t i = 0; i < (std::uintptr_t{1} << 16); ++i) {
    log.note({.address = i, .bytes = 1});
  }
  EXPECT_EQ(log.end().size(), std::size_t{1} << 16);
  ASSERT_TRUE(log.start());
  for (std::uintptr_t i = 0; i <= (std::uintptr_t{1} << 16); ++i) {
    log.note({.address = i, .bytes = 1});
  }
  EXPECT_TRUE(log.end().empty());
  ASSERT_TRUE(log.start());
  log.note({.address = 1, .bytes = 1});
  EXPECT_EQ(log.end().size(), 1U);
}

TEST(EventLog, BeginsEmptyInAForkedProcess) {
  EventLog log;
  ASSERT_TRUE(log.start());
  log.note({.address = 1, .bytes = 1});
  log.close_in_child();
  ASSERT_TRUE(log.start());
  EXPECT_TRUE(log.end().empty());
}

}  // namespace
}  // namespace brim
