#include <brim/memory/allocation_event.h>
#include <brim/need/trace.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <vector>

namespace brim {
namespace {

using Shared = std::shared_ptr<const Trace>;
using Events = std::vector<std::int32_t>;

/// What an allocator would have noted.
class Log {
 public:
  Log& make(std::uintptr_t address, std::int64_t bytes, std::int32_t operation) {
    return add({.address = address, .bytes = bytes}, operation);
  }
  Log& free(std::uintptr_t address, std::int64_t bytes, std::int32_t operation = 0) {
    return add({.address = address, .bytes = bytes, .freed = true}, operation);
  }
  Log& refuse(std::int64_t bytes, std::int32_t operation) {
    return add({.bytes = bytes, .refused = true}, operation);
  }
  [[nodiscard]] Shared failed() const { return trace_of(events_, false); }
  [[nodiscard]] Shared fitted(const Shared& before = nullptr,
                              const std::vector<Shared>& failed = {},
                              const std::set<std::int64_t>& in_use = {}) const {
    return trace_of(events_, true, before.get(), failed,
                    [&](std::int64_t address) { return in_use.contains(address); });
  }

 private:
  Log& add(AllocationEvent event, std::int32_t operation) {
    event.operation = operation;
    event.name = event.path = static_cast<std::uint64_t>(operation) + 1;
    events_.push_back(event);
    return *this;
  }

  std::vector<AllocationEvent> events_;
};

TEST(Trace, WhatWasHeldBeforeComesFirst) {
  const auto trace =
      Log().make(10, 100, 0).free(7, 70).free(10, 100).make(10, 200, 1).free(8, 80).fitted();
  ASSERT_EQ(trace->older, 2U);
  ASSERT_EQ(trace->requests.size(), 4U);
  EXPECT_EQ(trace->requests[0].bytes, 70);
  EXPECT_EQ(trace->requests[1].bytes, 80);
  EXPECT_EQ(trace->requests[2].bytes, 100);
  EXPECT_EQ(trace->requests[3].bytes, 200);  // at the same address, but another block
  EXPECT_EQ(trace->events, (Events{2, ~0, ~2, 3, ~1}));
  EXPECT_TRUE(trace->requests[2].freed);
  EXPECT_FALSE(trace->requests[3].freed);
  EXPECT_TRUE(trace->complete);
}

TEST(Trace, OfAFailureEndsWithTheRefusedRequest) {
  const auto trace =
      Log().make(1, 100, 0).make(2, 200, 1).refuse(400, 2).free(2, 200).free(1, 100).failed();
  EXPECT_FALSE(trace->complete);
  EXPECT_FALSE(trace->tolerates_refusal);
  EXPECT_EQ(trace->events, (Events{0, 1, 2})) << "what follows is the clean-up";
  EXPECT_EQ(trace->requests[2].bytes, 400);
  EXPECT_EQ(trace->requests[2].operation, 2);
}

TEST(Trace, WorkThatWentOnAfterARefusalToleratesIt) {
  const Log refused = Log().make(1, 100, 0).refuse(999, 1).make(2, 10, 1);
  EXPECT_TRUE(refused.fitted()->tolerates_refusal);
  EXPECT_EQ(refused.fitted()->requests.size(), 2U);
  EXPECT_TRUE(Log(refused).refuse(400, 2).failed()->tolerates_refusal);
  EXPECT_EQ(Log(refused).refuse(400, 2).failed()->events, (Events{0, 1, 2}));
  EXPECT_FALSE(Log().make(1, 100, 0).fitted()->tolerates_refusal);
}

TEST(Trace, NextCallFreesTheBlockOfTheSameRole) {
  // Two gradients, of other bytes in each call: the addresses tell which was which.
  const auto first = Log().make(1, 100, 0).make(2, 200, 1).fitted();
  const auto second =
      Log().free(2, 200).free(1, 100).make(3, 150, 0).make(4, 250, 1).fitted(first, {}, {3, 4});
  ASSERT_EQ(second->older, 2U);
  EXPECT_EQ(second->requests[0].successor, 3);
  EXPECT_EQ(second->requests[1].successor, 2);
  EXPECT_FALSE(second->requests[2].adds_up);
}

TEST(Trace, NextCallFreesABlockOfTheSameBytesWhereNoRoleIsKnown) {
  const auto trace = Log().free(8, 300).make(1, 100, 0).make(2, 300, 1).make(3, 50, 2).fitted();
  EXPECT_EQ(trace->requests[0].successor, 2);
  const auto freed = Log().free(8, 300).make(2, 300, 1).free(2, 300).fitted();
  EXPECT_EQ(freed->requests[0].successor, Trace::kNone) << "the call has freed it itself";
  const auto two = Log().free(8, 300).free(9, 300).make(2, 300, 1).fitted();
  EXPECT_EQ((two->requests[0].successor == 2) + (two->requests[1].successor == 2), 1)
      << "one block is freed once";
}

TEST(Trace, WhatTheCallBeforeLeftAndThisOneKeepsAddsUp) {
  const auto first = Log().make(1, 100, 0).make(2, 200, 1).fitted();
  const Log log = Log().make(3, 100, 0).make(4, 200, 1);
  const auto second = log.fitted(first, {}, {2, 3, 4});  // the caller has dropped the first result
  EXPECT_FALSE(second->requests[0].adds_up);
  EXPECT_TRUE(second->requests[1].adds_up);
  EXPECT_FALSE(log.fitted(nullptr, {}, {2, 3, 4})->requests[1].adds_up) << "nothing is known";
}

TEST(Trace, WhatOnlyThisCallMadeAddsUp) {
  const auto first = Log().make(1, 100, 0).fitted();
  const auto second = Log().make(2, 100, 0).make(3, 50, 7).fitted(first, {}, {2, 3});
  EXPECT_FALSE(second->requests[0].adds_up);
  EXPECT_TRUE(second->requests[1].adds_up);
}

TEST(Trace, WhatAFailedAttemptLeftIsNotFoundByTheNextCall) {
  const auto failed = Log().make(1, 100, 0).make(2, 70, 1).refuse(900, 2).free(1, 100).failed();
  const auto trace = Log()
                         .free(2, 70)
                         .free(9, 70)  // a gradient of the call before
                         .make(3, 50, 0)
                         .make(4, 70, 1)
                         .fitted(nullptr, {failed});
  ASSERT_EQ(trace->older, 2U);
  EXPECT_TRUE(trace->requests[0].from_failure);
  EXPECT_EQ(trace->requests[0].successor, Trace::kNone);
  EXPECT_FALSE(trace->requests[1].from_failure);
  EXPECT_EQ(trace->requests[1].successor, 3);
}

TEST(Trace, WhatAFailedAttemptFreedIsFreedAtTheSamePlaceByTheNextCall) {
  // zero_grad() after the first operator: the failed attempt has done it, this call found nothing.
  const auto before = Log().make(1, 500, 3).fitted();
  const auto failed = Log().make(2, 80, 0).free(1, 500).refuse(900, 1).free(2, 80).failed();
  const auto trace =
      Log().make(3, 40, 0).make(4, 450, 1).free(4, 450).make(5, 500, 3).free(3, 40).fitted(
          before, {failed}, {5});
  ASSERT_EQ(trace->older, 1U);
  EXPECT_EQ(trace->requests[0].bytes, 500);
  EXPECT_EQ(trace->requests[0].successor, 3);
  EXPECT_EQ(trace->events, (Events{1, ~0, 2, ~2, 3, ~1}));
}

TEST(Trace, WhatAFailedAttemptPutWhereAnEarlierBlockLayIsItsOwn) {
  const auto before = Log().make(1, 70, 1).fitted();
  // It freed the gradient at 1, and its own lay there next.
  const auto failed = Log().free(1, 70).make(1, 70, 1).refuse(900, 2).failed();
  const auto trace = Log().free(1, 70).make(4, 70, 1).fitted(before, {failed}, {4});
  std::size_t of_failure = 0;
  for (std::size_t i = 0; i < trace->older; ++i) {
    of_failure += trace->requests[i].from_failure ? 1 : 0;
    EXPECT_NE(trace->requests[i].from_failure, trace->requests[i].successor != Trace::kNone);
  }
  EXPECT_EQ(of_failure, 1U);
}

TEST(Trace, WhatAFailedAttemptFreedAfterTheLastCommonRequestIsFreedAtTheEnd) {
  const auto before = Log().make(1, 500, 3).fitted();
  const auto failed = Log().make(2, 80, 0).free(1, 500).refuse(900, 9).free(2, 80).failed();
  const auto trace = Log().make(3, 40, 0).make(5, 500, 3).free(3, 40).fitted(before, {failed}, {5});
  ASSERT_EQ(trace->older, 1U);
  EXPECT_EQ(trace->events.back(), ~0);
}

}  // namespace
}  // namespace brim
