#include "predict/recorded_growth.h"

#include <brim/predict/allocation_record.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "tensors.h"

namespace brim {
namespace {

using detail::RecordedGrowth;

using tests::kMiB;

AllocationEvent alloc_event(std::uintptr_t address, std::int64_t bytes) {
  return {.address = address, .bytes = bytes};
}
AllocationEvent free_event(std::uintptr_t address, std::int64_t bytes = 0) {
  return {.address = address, .bytes = bytes, .freed = true};
}
AllocationEvent refused_event(std::int64_t bytes) { return {.bytes = bytes, .refused = true}; }

Attempt recorded_fit(std::int64_t size, const std::vector<AllocationEvent>& events) {
  return {.values = {size}, .record = record_of(events)};
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
  const auto record = record_of(events);
  EXPECT_EQ(record->older, 1U);
  ASSERT_EQ(record->requests.size(), 3U);
  EXPECT_EQ(record->requests[0].bytes, 20);
  EXPECT_TRUE(record->requests[1].freed);
  EXPECT_FALSE(record->requests[2].freed);
  EXPECT_EQ(record->events, (std::vector<std::int32_t>{1, ~0, ~1, 2}));
}

TEST(AllocationRecord, WhatStaysInPlaceOfWhatWasHeldBeforeIsReplaced) {
  // Two gradients and a third of other bytes are freed; an activation, two gradients, two states.
  const auto replaced = [](bool first_stays, bool second_stays) {
    std::vector<AllocationEvent> events{free_event(1, 40),  free_event(2, 40),  free_event(3, 50),
                                        alloc_event(4, 70), free_event(4),      alloc_event(5, 40),
                                        alloc_event(6, 40), alloc_event(7, 40), alloc_event(8, 40)};
    if (!first_stays) {
      events.push_back(free_event(5));
    }
    if (!second_stays) {
      events.push_back(free_event(6));
    }
    return record_of(events)->replaced();
  };
  EXPECT_EQ(replaced(true, true), 80);
  EXPECT_EQ(replaced(true, false), 40);
  EXPECT_EQ(replaced(false, false), 0);
}

TEST(AllocationRecord, GoesOnRefusedUnlessThatEndedIt) {
  const std::vector<AllocationEvent> events{alloc_event(1, 10), refused_event(20),
                                            alloc_event(2, 5)};
  EXPECT_TRUE(record_of(events)->goes_on_refused);
  EXPECT_FALSE(record_of(events, false)->goes_on_refused);
  EXPECT_EQ(record_of(events)->requests.size(), 2U);
}

TEST(RecordedGrowth, IsEmptyWithoutARecord) {
  EXPECT_FALSE(RecordedGrowth::of(std::vector<Attempt>{{.values = {3}}}));
}

AllocatorModel recorded_device(std::int64_t mebibytes) {
  return AllocatorModel({.capacity = mebibytes * kMiB});
}

bool fits_from(const std::vector<Attempt>& attempts, double size, const AllocatorModel& now) {
  auto growth = RecordedGrowth::of(attempts);
  return growth && growth->begin_from(now) && growth->fits(size);
}

TEST(RecordedGrowth, FitsWhereTheBlocksDo) {
  const std::vector<Attempt> attempts{with_a_gap(10), with_a_gap(20)};
  auto growth = RecordedGrowth::of(attempts);
  ASSERT_TRUE(growth && growth->knows_growth());
  EXPECT_EQ(growth->size(), 20);
  // 9 MiB per item at most are held. The block of 3 cannot be used for 5, but is given back.
  EXPECT_TRUE(growth->begin_from(recorded_device(900)));
  EXPECT_TRUE(growth->fits(100));
  EXPECT_FALSE(growth->fits(101));
  EXPECT_EQ(growth->largest_between(20, 1000), 100);
  EXPECT_EQ(growth->largest_between(101, 1000), 0);
  EXPECT_EQ(growth->largest_between(1, 50), 50);
}

TEST(RecordedGrowth, TemporaryOfAGradientsBytesIsNotItsSuccessor) {
  // The gradient of the call before is freed, then come an activation and the new gradient. At 8
  // items the activation is as large as the gradient.
  AllocatorModel now = recorded_device(4096);
  const auto gradient = now.allocate(1024 * kMiB, 0);
  ASSERT_TRUE(gradient);
  const std::int64_t place = now.block(*gradient).address;
  const auto step = [&](std::int64_t size) {
    return recorded_fit(size, {free_event(77, 1024 * kMiB), alloc_event(2, 128 * size * kMiB),
                               free_event(2), alloc_event(place, 1024 * kMiB)});
  };
  const std::vector<Attempt> attempts{step(4), step(8)};
  auto growth = RecordedGrowth::of(attempts);
  ASSERT_TRUE(growth && growth->begin_from(now));
  EXPECT_EQ(growth->largest_between(8, 64), 32);
}

TEST(RecordedGrowth, SparesALittleOfManyItemsAndNoneOfFew) {
  const std::vector<Attempt> attempts{with_a_gap(100), with_a_gap(200)};
  auto growth = RecordedGrowth::of(attempts);
  ASSERT_TRUE(growth && growth->begin_from(recorded_device(9000)));
  EXPECT_EQ(growth->largest_between(200, 2000), 995);
  EXPECT_EQ(growth->largest_between(1, 199), 199);
}

TEST(RecordedGrowth, NeedsInExactBytes) {
  const std::vector<Attempt> attempts{with_a_gap(10), with_a_gap(20)};
  const auto growth = RecordedGrowth::of(attempts);
  EXPECT_EQ(growth->need_at(20), 180 * kMiB);
  EXPECT_EQ(growth->need_at(100), 900 * kMiB);
  EXPECT_EQ(growth->largest_within(900 * kMiB, 1000), 100);
  EXPECT_EQ(growth->largest_within(900 * kMiB, 50), 50);
  EXPECT_EQ(growth->largest_within(8 * kMiB, 50), 0);
}

/// The activations, and then an optimizer's step that needs more.
Attempt with_a_large_end(std::int64_t size) {
  return recorded_fit(size, {free_event(9, 50), alloc_event(1, size), free_event(1),
                             alloc_event(2, 900), free_event(2), alloc_event(9, 50)});
}

TEST(RecordedGrowth, KnowsTheGrowthBelowThePeak) {
  const std::vector<Attempt> attempts{with_a_large_end(10), with_a_large_end(20)};
  const auto growth = RecordedGrowth::of(attempts);
  EXPECT_EQ(growth->need_at(10), 900) << "what it freed first is its own";
  EXPECT_EQ(growth->need_at(899), 900);
  EXPECT_EQ(growth->largest_within(910, 5000), 910);
}

/// One tensor, and a result that a library makes with a workspace for large sizes only.
Attempt with_a_workspace_from(std::int64_t least, std::int64_t size) {
  std::vector<AllocationEvent> events{alloc_event(1, 10 * size), alloc_event(2, 7 * size)};
  if (size >= least) {
    events.insert(events.end(), {alloc_event(3, 600), free_event(3)});
  }
  events.insert(events.end(), {free_event(1), alloc_event(4, 4), free_event(2), free_event(4)});
  return recorded_fit(size, events);
}

TEST(RecordedGrowth, AWorkspaceThatOneSizeOnlyTakesDoesNotHideTheRest) {
  for (const bool larger_is_newer : {false, true}) {
    std::vector<Attempt> attempts{with_a_workspace_from(20, 10), with_a_workspace_from(20, 20)};
    if (!larger_is_newer) {
      std::swap(attempts[0], attempts[1]);
    }
    const auto growth = RecordedGrowth::of(attempts);
    ASSERT_TRUE(growth && growth->knows_growth());
    EXPECT_EQ(growth->need_at(20), 17 * 20 + 600);
    EXPECT_GE(growth->need_at(40), 17 * 40 + 600);
    EXPECT_LE(growth->need_at(40), 17 * 40 + 2 * 600) << "it may grow";
  }
}

TEST(RecordedGrowth, WorkspacesAtTheEndDoNotHideTheRest) {
  const auto work = [](std::int64_t size, int workspaces) {
    std::vector<AllocationEvent> events{alloc_event(1, 10 * size), alloc_event(2, 7 * size),
                                        free_event(1), free_event(2)};
    for (int i = 0; i < workspaces; ++i) {
      events.insert(events.end(), {alloc_event(3, 8), free_event(3)});
    }
    return recorded_fit(size, events);
  };
  for (const int first : {0, 6}) {
    const std::vector<Attempt> attempts{work(10, first), work(20, 6 - first)};
    const auto growth = RecordedGrowth::of(attempts);
    ASSERT_TRUE(growth->knows_growth()) << first;
    EXPECT_EQ(growth->need_at(40), 17 * 40);
  }
}

TEST(RecordedGrowth, ScalarsDoNotHideTheRest) {
  const auto work = [](std::int64_t size, bool first_step) {
    std::vector<AllocationEvent> events{alloc_event(1, 10 * size)};
    for (int i = 0; !first_step && i < 6; ++i) {  // a number, and as it is used
      events.insert(events.end(),
                    {alloc_event(3, 8), alloc_event(4, 4), free_event(4), free_event(3)});
    }
    events.insert(events.end(), {alloc_event(2, 7 * size), free_event(1), free_event(2)});
    return recorded_fit(size, events);
  };
  const std::vector<Attempt> attempts{work(10, true), work(20, false)};
  const auto growth = RecordedGrowth::of(attempts);
  ASSERT_TRUE(growth->knows_growth());
  EXPECT_EQ(growth->need_at(40), 17 * 40);
}

TEST(RecordedGrowth, TheRecordThatDiffersMostAmongSimilarSizesCounts) {
  // Rows are padded to an even number: neighbours show a growth of 0 or of twice as much.
  const auto padded = [](std::int64_t size) {
    return recorded_fit(size, {alloc_event(1, 100 * (size + size % 2)), free_event(1)});
  };
  const auto need_at_16 = [&](const std::vector<std::int64_t>& sizes) {
    std::vector<Attempt> attempts;
    for (const std::int64_t size : sizes) {
      attempts.push_back(padded(size));
    }
    return RecordedGrowth::of(attempts)->need_at(16);
  };
  EXPECT_EQ(need_at_16({13, 14}), 1400) << "nothing else is known";
  EXPECT_EQ(need_at_16({10, 13, 14}), 1600);
  EXPECT_EQ(need_at_16({2, 10, 13, 14}), 1600);
  EXPECT_EQ(need_at_16({3, 2, 14}), 1600) << "the newest, where none is similar";
}

TEST(RecordedGrowth, OtherRequestsAreAnotherWork) {
  const std::vector<Attempt> attempts{
      recorded_fit(10, {alloc_event(1, 10), alloc_event(2, 20), alloc_event(3, 30), free_event(1),
                        free_event(2), free_event(3)}),
      recorded_fit(20, {alloc_event(1, 20), free_event(1)})};
  EXPECT_FALSE(RecordedGrowth::of(attempts)->knows_growth());
}

TEST(RecordedGrowth, AWorkspaceIsNotTakenForATensorOfNearlyItsBytes) {
  // At 20 items there is a workspace that is nearly as large as the tensor after it is at 10.
  const std::vector<Attempt> attempts{
      recorded_fit(10, {alloc_event(1, 100), alloc_event(2, 1000), free_event(1), free_event(2)}),
      recorded_fit(20, {alloc_event(1, 200), alloc_event(3, 1010), free_event(3),
                        alloc_event(2, 2000), free_event(1), free_event(2)})};
  const auto growth = RecordedGrowth::of(attempts);
  ASSERT_TRUE(growth->knows_growth());
  EXPECT_EQ(growth->need_at(40), 400 + 4000);
}

TEST(RecordedGrowth, ATensorThatShrinksAsTheSizeGrowsIsAnotherOne) {
  const std::vector<Attempt> attempts{
      recorded_fit(10, {alloc_event(1, 5000), alloc_event(2, 1000), alloc_event(3, 100),
                        free_event(3), free_event(1), free_event(2)}),
      recorded_fit(20, {alloc_event(1, 200), alloc_event(2, 2000), alloc_event(3, 100),
                        free_event(3), free_event(1), free_event(2)})};
  EXPECT_FALSE(RecordedGrowth::of(attempts)->knows_growth());
}

TEST(RecordedGrowth, BeginsWithWhatTheDeviceHolds) {
  const std::vector<Attempt> attempts{with_a_gap(10), with_a_gap(20)};
  AllocatorModel device = recorded_device(900);
  const auto others = device.allocate(90 * kMiB);
  EXPECT_FALSE(fits_from(attempts, 100, device));
  EXPECT_TRUE(fits_from(attempts, 90, device));
  device.free(*others);
  EXPECT_TRUE(fits_from(attempts, 100, device)) << "its cache can be used, or released";
}

/// A tensor of 10 MiB per item and then a gradient of 20 MiB in its place, which the next call
/// frees at its start.
AllocationRecord::Request kept_gradient(AllocatorModel& device, std::int64_t size) {
  const auto activation = device.allocate(10 * size * kMiB);
  device.free(*activation);
  const AllocatorBlock gradient = device.block(*device.allocate(20 * kMiB));
  return {.bytes = gradient.requested, .address = gradient.address};
}

std::vector<Attempt> with_kept_gradients(std::int64_t address) {
  const auto work = [](std::int64_t size, std::uintptr_t before, std::uintptr_t after) {
    return recorded_fit(size, {free_event(before, 20 * kMiB), alloc_event(1, 10 * size * kMiB),
                               free_event(1), alloc_event(after, 20 * kMiB)});
  };
  return {work(10, 100, 200), work(20, 200, static_cast<std::uintptr_t>(address))};
}

TEST(RecordedGrowth, AGradientKeepsTheSegmentThatItLiesIn) {
  AllocatorModel device = recorded_device(500);
  const auto gradient = kept_gradient(device, 20);
  const auto attempts = with_kept_gradients(gradient.address);
  // 200 MiB stay reserved while the call begins; freed, they make room for 10 MiB per item.
  EXPECT_TRUE(fits_from(attempts, 50, device));
  EXPECT_FALSE(fits_from(attempts, 51, device));
  // Not if a small tensor lies there too.
  ASSERT_TRUE(device.allocate(2 * kMiB));
  EXPECT_TRUE(fits_from(attempts, 30, device));
  EXPECT_FALSE(fits_from(attempts, 31, device));
}

TEST(RecordedGrowth, AResultIsHeldTwiceOnlyIfTheCallerKeepsItMeanwhile) {
  AllocatorModel device = recorded_device(200);
  const auto result = device.allocate(20 * kMiB);
  const auto address = static_cast<std::uintptr_t>(device.block(*result).address);
  const auto work = [&](std::int64_t size) {
    return recorded_fit(size, {alloc_event(1 << 10, size * kMiB), alloc_event(address, size * kMiB),
                               free_event(1 << 10)});
  };
  const std::vector<Attempt> attempts{work(10), work(20)};
  EXPECT_TRUE(fits_from(attempts, 66, device));
  EXPECT_FALSE(fits_from(attempts, 67, device));
  device.free(*result);
  EXPECT_TRUE(fits_from(attempts, 100, device));
  EXPECT_FALSE(fits_from(attempts, 101, device));
}

TEST(RecordedGrowth, IsOutOfDateWhereTheGradientsHaveMoved) {
  AllocatorModel device = recorded_device(500);
  const auto gradient = kept_gradient(device, 20);
  const auto attempts = with_kept_gradients(gradient.address + 512);
  EXPECT_FALSE(RecordedGrowth::of(attempts)->begin_from(device));
}

TEST(AllocationRecord, ChoosesOnceForTheSameQuestion) {
  const Attempt attempt = with_a_gap(10);
  int asked = 0;
  const auto choose = [&] { return std::optional<std::int64_t>(++asked); };
  EXPECT_EQ(attempt.record->chosen(100, 1e9, choose), 1);
  EXPECT_EQ(attempt.record->chosen(100, 1.0005e9, choose), 1);
  EXPECT_EQ(attempt.record->chosen(100, 1.1e9, choose), 2);
  EXPECT_EQ(attempt.record->chosen(90, 1.1e9, choose), 3);
}

TEST(RecordedGrowth, TellsAConstantPartFromASquare) {
  const auto work = [](std::int64_t size) {
    return recorded_fit(size, {alloc_event(1, 100 * kMiB), alloc_event(2, size * size * kMiB),
                               free_event(2), free_event(1)});
  };
  const std::vector<Attempt> attempts{work(4), work(8)};
  EXPECT_TRUE(fits_from(attempts, 20, recorded_device(500)));
  EXPECT_FALSE(fits_from(attempts, 21, recorded_device(500)));
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
  EXPECT_TRUE(fits_from(attempts, 100, recorded_device(100)));
}

TEST(RecordedGrowth, AGradientThatStaysOnlyAfterTheFirstStepIsTheSame) {
  const auto work = [](std::int64_t size, bool first) {
    std::vector<AllocationEvent> events{alloc_event(1, 90 * size)};
    for (const std::uintptr_t layer : {10, 20, 30}) {
      events.push_back(alloc_event(layer, 900));
      events.push_back(alloc_event(layer + 1, 90 * size));
      if (!first) {
        events.push_back(free_event(layer));
      }
      events.push_back(free_event(layer + 1));
    }
    events.push_back(free_event(1));
    return recorded_fit(size, events);
  };
  const std::vector<Attempt> attempts{work(8, true), work(9, false)};
  const auto growth = RecordedGrowth::of(attempts);
  ASSERT_TRUE(growth->knows_growth());
  EXPECT_EQ(growth->need_at(20), 2 * 90 * 20 + 900);
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
  EXPECT_FALSE(fits_from(attempts, 100, recorded_device(200)));
  auto events = work(50);
  events.push_back(refused_event(200 * kMiB));
  events.push_back(refused_event(100 * kMiB));
  attempts.push_back(
      {.values = {50}, .outcome = OomKind::device_memory, .record = record_of(events, false)});
  EXPECT_TRUE(fits_from(attempts, 100, recorded_device(200)));
  EXPECT_FALSE(fits_from(attempts, 201, recorded_device(200))) << "the tensor may not";
}

TEST(RecordedGrowth, AWorkspaceOfTheOtherRecordIsNotNeededWhereOneWasRefused) {
  std::vector<Attempt> attempts{with_a_workspace_from(20, 20), with_a_workspace_from(20, 10)};
  EXPECT_EQ(RecordedGrowth::of(attempts)->need_at(20), 17 * 20 + 600);
  attempts.push_back(
      {.values = {50},
       .outcome = OomKind::device_memory,
       .record =
           record_of(std::vector<AllocationEvent>{refused_event(600), refused_event(500)}, false)});
  EXPECT_EQ(RecordedGrowth::of(attempts)->need_at(20), 17 * 20);
}

}  // namespace
}  // namespace brim
