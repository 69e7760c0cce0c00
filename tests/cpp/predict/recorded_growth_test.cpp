#include "predict/recorded_growth.h"

#include <brim/predict/allocation_record.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "tensors.h"

namespace brim {
namespace {

using detail::RecordedGrowth;

using tests::kMiB;
constexpr AllocatorOptions kRecordedCuda{};

AllocationEvent alloc_event(std::uintptr_t address, std::int64_t bytes) {
  return {.address = address, .bytes = bytes};
}
AllocationEvent free_event(std::uintptr_t address, std::int64_t bytes = 0) {
  return {.address = address, .bytes = bytes, .freed = true};
}
AllocationEvent refused_event(std::int64_t bytes) { return {.bytes = bytes, .refused = true}; }

Attempt recorded_fit(std::int64_t size, const std::vector<AllocationEvent>& events) {
  return {.values = {size}, .record = record_of(events, 0)};
}

/// Three tensors, of which the second is freed before the third is made: 4, 3 and 5 MiB per item.
Attempt with_a_gap(std::int64_t size) {
  return recorded_fit(
      size, {alloc_event(1, 4 * size * kMiB), alloc_event(2, 3 * size * kMiB), free_event(2),
             alloc_event(3, 5 * size * kMiB), free_event(1), free_event(3)});
}

TEST(AllocationRecord, WhatWasHeldBeforeComesFirst) {
  const std::vector<AllocationEvent> events{alloc_event(1, 10), free_event(7, 20), free_event(1),
                                            alloc_event(7, 30)};
  const auto record = record_of(events, 5);
  EXPECT_EQ(record->older, 1U);
  EXPECT_EQ(record->outside, 5);
  ASSERT_EQ(record->requests.size(), 3U);
  EXPECT_EQ(record->requests[0].bytes, 20);
  EXPECT_TRUE(record->requests[1].freed);
  EXPECT_FALSE(record->requests[2].freed);
  EXPECT_EQ(record->events, (std::vector<std::int32_t>{1, ~0, ~1, 2}));
}

TEST(AllocationRecord, GoesOnRefusedUnlessThatEndedIt) {
  const std::vector<AllocationEvent> events{alloc_event(1, 10), refused_event(20),
                                            alloc_event(2, 5)};
  EXPECT_TRUE(record_of(events, 0)->goes_on_refused);
  EXPECT_FALSE(record_of(events, 0, false)->goes_on_refused);
  EXPECT_EQ(record_of(events, 0)->requests.size(), 2U);
}

TEST(RecordedGrowth, IsEmptyWithoutARecord) {
  EXPECT_FALSE(RecordedGrowth::of(std::vector<Attempt>{{.values = {3}}}));
}

TEST(RecordedGrowth, FitsWhereTheBlocksDo) {
  const std::vector<Attempt> attempts{with_a_gap(10), with_a_gap(20)};
  const auto growth = RecordedGrowth::of(attempts);
  ASSERT_TRUE(growth && growth->knows_growth());
  // 9 MiB per item at most are held. The block of 3 cannot be used for 5, but is given back.
  EXPECT_TRUE(growth->fits(100, 900.0 * kMiB, kRecordedCuda));
  EXPECT_FALSE(growth->fits(101, 900.0 * kMiB, kRecordedCuda));
  const double largest = growth->largest(20, 1000, 900.0 * kMiB, kRecordedCuda);
  EXPECT_GT(largest, 99);
  EXPECT_LE(largest, 100);
}

TEST(RecordedGrowth, TellsAConstantPartFromASquare) {
  const auto work = [](std::int64_t size) {
    return recorded_fit(size, {alloc_event(1, 100 * kMiB), alloc_event(2, size * size * kMiB),
                               free_event(2), free_event(1)});
  };
  const std::vector<Attempt> attempts{work(4), work(8)};
  const auto growth = RecordedGrowth::of(attempts);
  EXPECT_TRUE(growth->fits(20, 500.0 * kMiB, kRecordedCuda));
  EXPECT_FALSE(growth->fits(21, 500.0 * kMiB, kRecordedCuda));
}

TEST(RecordedGrowth, MatchesWithoutWhatTheFirstCallMadeForGood) {
  const auto work = [](std::int64_t size, bool first) {
    std::vector<AllocationEvent> events{alloc_event(1, size * kMiB)};
    if (first) {
      events.push_back(alloc_event(9, 50 * kMiB));
    }
    events.push_back(free_event(1));
    return recorded_fit(size, events);
  };
  const std::vector<Attempt> attempts{work(10, true), work(20, false)};
  const auto growth = RecordedGrowth::of(attempts);
  ASSERT_TRUE(growth);
  EXPECT_TRUE(growth->knows_growth());
  EXPECT_TRUE(growth->fits(100, 100.0 * kMiB, kRecordedCuda));
}

TEST(RecordedGrowth, OtherRequestsDoNotMatch) {
  const std::vector<Attempt> attempts{with_a_gap(10),
                                      recorded_fit(20, {alloc_event(1, kMiB), free_event(1)})};
  const auto growth = RecordedGrowth::of(attempts);
  ASSERT_TRUE(growth);
  EXPECT_FALSE(growth->knows_growth());
}

TEST(RecordedGrowth, AWorkspaceMayBeRefusedWhereOneWasBefore) {
  const auto work = [](std::int64_t size) {
    return std::vector<AllocationEvent>{
        alloc_event(1, size * kMiB), alloc_event(2, 4 * size * kMiB), free_event(2), free_event(1)};
  };
  std::vector<Attempt> attempts{recorded_fit(10, work(10)), recorded_fit(20, work(20))};
  EXPECT_FALSE(RecordedGrowth::of(attempts)->fits(100, 200.0 * kMiB, kRecordedCuda));
  auto events = work(50);
  events.push_back(refused_event(200 * kMiB));
  events.push_back(refused_event(100 * kMiB));
  attempts.push_back(
      {.values = {50}, .outcome = OomKind::device_memory, .record = record_of(events, 0, false)});
  EXPECT_TRUE(RecordedGrowth::of(attempts)->fits(100, 200.0 * kMiB, kRecordedCuda));
}

}  // namespace
}  // namespace brim
