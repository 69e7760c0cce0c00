// Traces: what replaying them reports, by hand and against sums over random ones.

#include <brim/predict/memory_trace.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "tensors.h"

namespace brim {
namespace {

using tests::kMiB;
constexpr AllocatorOptions kExact{.kind = AllocatorKind::exact};

std::int64_t held(const TraceReport& report, MemoryKind kind) {
  return report.held.at(static_cast<std::size_t>(kind));
}

/// 100 bytes of weights, then a step that holds 70 more at its peak and leaves 30.
struct Step {
  MemoryTrace trace;
  std::int64_t weight = trace.allocate(100, MemoryKind::parameter, trace.place("fc.weight"));
  std::int64_t start = trace.size();
  std::int64_t output = trace.allocate(40, MemoryKind::other, trace.place("model.py:3"));
  std::int64_t gradient = 0;

  Step() {
    gradient = trace.allocate(30);
    trace.free(output);
    trace.free(trace.allocate(5));
    trace.set_kind(output, MemoryKind::activation);  // known only now
    trace.set_kind(gradient, MemoryKind::gradient);
    trace.set_place(gradient, trace.place("fc.weight"));
  }
};

TEST(MemoryTrace, PeakIsAboveWhatWasHeldAtTheStart) {
  const Step step;
  const TraceReport report = replay(step.trace, kExact, step.start);
  EXPECT_EQ(report.held_before, 100);
  EXPECT_EQ(report.peak, 70);
  EXPECT_EQ(report.left, 30);
  EXPECT_EQ(report.reserved, 170);
  EXPECT_EQ(report.peak_event, 3);
  EXPECT_EQ(report.at_peak, (AllocatorUse{170, 170, 170, 0}));
  EXPECT_TRUE(report.fits());
  EXPECT_EQ(report.fragmentation(), 0);
  EXPECT_EQ(replay(step.trace, kExact).peak, 170);
}

TEST(MemoryTrace, TimelineHoldsWhatTheEventsHold) {
  const Step step;
  const std::vector<HeldMoment> all = timeline(step.trace, kExact, step.start);
  std::vector<std::int64_t> sums;
  for (const HeldMoment& moment : all) {
    sums.push_back(std::accumulate(moment.held.begin(), moment.held.end(), std::int64_t{0}));
  }
  EXPECT_EQ(sums, (std::vector<std::int64_t>{100, 140, 170, 130, 135, 130}));
  EXPECT_EQ(all[0].allocation, step.weight);
  EXPECT_EQ(all[2].allocation, step.gradient);
  EXPECT_EQ(all[2].event, 3);
  EXPECT_EQ(all[2].reserved, 170);
  EXPECT_EQ(all[2].held.at(static_cast<std::size_t>(MemoryKind::activation)), 40);
}

TEST(MemoryTrace, AShorterTimelineKeepsTheHighestMomentOfEachGroup) {
  const Step step;
  const std::vector<HeldMoment> two = timeline(step.trace, kExact, step.start, 2);
  ASSERT_EQ(two.size(), 2);
  EXPECT_EQ(two[0].event, 3);  // 100, 140, 170
  EXPECT_EQ(two[1].event, 5);  // 130, 135, 130
  EXPECT_EQ(timeline(step.trace, kExact, step.start, 5).size(), 3);
  EXPECT_THROW(timeline(step.trace, kExact, step.start, 0), std::invalid_argument);
  EXPECT_THROW(timeline(step.trace, kExact, 99), std::invalid_argument);
}

TEST(MemoryTrace, NamesWhoHeldThePeak) {
  const Step step;
  const TraceReport report = replay(step.trace, kExact, step.start, 2);
  EXPECT_EQ(held(report, MemoryKind::parameter), 100);
  EXPECT_EQ(held(report, MemoryKind::activation), 40);
  EXPECT_EQ(held(report, MemoryKind::gradient), 30);
  EXPECT_EQ(held(report, MemoryKind::other), 0);
  ASSERT_EQ(report.largest.size(), 2U);
  EXPECT_EQ(report.largest[0].id, step.weight);
  EXPECT_EQ(report.largest[0].place, "fc.weight");
  EXPECT_EQ(report.largest[1].id, step.output);
  EXPECT_EQ(report.largest[1].bytes, 40);
  EXPECT_EQ(report.largest[1].kind, MemoryKind::activation);
  EXPECT_EQ(report.largest[1].place, "model.py:3");
}

TEST(MemoryTrace, WorkThatOnlyFreesHasItsPeakAtTheStart) {
  MemoryTrace trace;
  const auto first = trace.allocate(10, MemoryKind::input);
  trace.allocate(20);
  const std::int64_t start = trace.size();
  trace.free(first);
  const TraceReport report = replay(trace, kExact, start);
  EXPECT_EQ(report.peak, 0);
  EXPECT_EQ(report.left, -10);
  EXPECT_EQ(report.peak_event, start);
  EXPECT_EQ(held(report, MemoryKind::input), 10);
  const TraceReport nothing = replay(trace, kExact, trace.size());
  EXPECT_EQ(nothing.held_before, 20);
  EXPECT_EQ(nothing.peak, 0);
  EXPECT_EQ(nothing.reserved, 20);
}

TEST(MemoryTrace, CountsBlocksAndSegmentsOfTheCachingAllocator) {
  MemoryTrace trace;
  trace.allocate(1000, MemoryKind::parameter);
  trace.allocate(9 * kMiB, MemoryKind::activation);
  const TraceReport report = replay(trace, {});
  EXPECT_EQ(report.peak, 1024 + 9 * kMiB);
  EXPECT_EQ(held(report, MemoryKind::parameter), 1024);
  EXPECT_EQ(report.largest[1].bytes, 1024);
  EXPECT_EQ(report.reserved, 22 * kMiB);
  EXPECT_DOUBLE_EQ(report.fragmentation(), 1 - (1024 + 9.0 * kMiB) / (22.0 * kMiB));
}

TEST(MemoryTrace, SaysWhatDoesNotFitAndGoesOn) {
  MemoryTrace trace;
  const auto cached = trace.allocate(30 * kMiB);
  trace.free(cached);
  trace.allocate(40 * kMiB);  // fits if the cache is released
  const auto failing = trace.allocate(20 * kMiB, MemoryKind::temporary, trace.place("loss.py:8"));
  trace.allocate(60 * kMiB);
  const TraceReport report = replay(trace, {.capacity = 50 * kMiB});
  EXPECT_FALSE(report.fits());
  EXPECT_EQ(report.failed_event, 3);
  ASSERT_TRUE(report.failed.has_value());
  EXPECT_EQ(report.failed->id, failing);
  EXPECT_EQ(report.failed->bytes, 20 * kMiB);
  EXPECT_EQ(report.failed->kind, MemoryKind::temporary);
  EXPECT_EQ(report.failed->place, "loss.py:8");
  EXPECT_EQ(report.retries, 2);
  EXPECT_EQ(report.peak, 120 * kMiB);
  // The 20 MiB are cut out of the cached 30 MiB, which cannot be released any more.
  EXPECT_EQ(replay(trace, {.capacity = 129 * kMiB}).failed_event, 4);
  EXPECT_TRUE(replay(trace, {.capacity = 130 * kMiB}).fits());
}

TEST(MemoryTrace, EmptyingTheCacheIsPartOfTheWork) {
  MemoryTrace trace;
  trace.free(trace.allocate(30 * kMiB));
  trace.empty_cache();
  trace.allocate(50 * kMiB);
  EXPECT_EQ(replay(trace, {}).reserved, 50 * kMiB);
}

TEST(MemoryTrace, PlacesAreNumberedOnce) {
  MemoryTrace trace;
  EXPECT_EQ(trace.place(""), 0);
  const auto one = trace.place("a.py:1");
  EXPECT_NE(trace.place("a.py:2"), one);
  EXPECT_EQ(trace.place("a.py:1"), one);
  EXPECT_EQ(trace.place_text(one), "a.py:1");
}

TEST(MemoryTrace, KindsHaveNames) {
  EXPECT_STREQ(to_string(MemoryKind::parameter), "parameter");
  EXPECT_STREQ(to_string(MemoryKind::optimizer_state), "optimizer state");
  EXPECT_STREQ(to_string(MemoryKind::other), "other");
  EXPECT_EQ(static_cast<std::size_t>(MemoryKind::other) + 1, kMemoryKinds);
}

TEST(MemoryTrace, RefusesWrongArguments) {
  MemoryTrace trace;
  EXPECT_THROW(trace.allocate(-1), std::invalid_argument);
  EXPECT_THROW(trace.allocate(1, MemoryKind::other, 1), std::invalid_argument);
  EXPECT_THROW(trace.free(0), std::invalid_argument);
  const auto one = trace.allocate(1);
  trace.free(one);
  EXPECT_THROW(trace.free(one), std::invalid_argument);
  EXPECT_THROW(trace.set_kind(1, MemoryKind::input), std::invalid_argument);
  EXPECT_THROW(trace.set_place(0, -1), std::invalid_argument);
  EXPECT_THROW(static_cast<void>(trace.allocation(5)), std::invalid_argument);
  EXPECT_EQ(trace.size(), 2);
  EXPECT_THROW(replay(trace, {}, 3), std::invalid_argument);
  EXPECT_THROW(replay(trace, {}, -1), std::invalid_argument);
  EXPECT_THROW(replay(trace, {}, 0, -1), std::invalid_argument);
  EXPECT_THROW(replay(trace, {.capacity = -1}), std::invalid_argument);
}

TEST(MemoryTrace, ReportsAgreeWithSumsOverTheEvents) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 30; ++round) {
    MemoryTrace trace;
    std::vector<std::int64_t> live;
    for (int i = 0; i < 300; ++i) {
      if (!live.empty() && random() % 5 < 2) {
        const auto which = static_cast<std::ptrdiff_t>(random() % live.size());
        trace.free(live[static_cast<std::size_t>(which)]);
        live.erase(live.begin() + which);
      } else {
        live.push_back(trace.allocate(static_cast<std::int64_t>(random() % 5000),
                                      static_cast<MemoryKind>(random() % kMemoryKinds)));
      }
    }
    const auto start = static_cast<std::int64_t>(random() % 300);
    const TraceReport report = replay(trace, kExact, start);
    std::int64_t now = 0;
    std::int64_t most = -1;
    std::int64_t before = 0;
    std::int64_t when = 0;
    for (std::int64_t i = 0; i <= trace.size(); ++i) {
      before = i == start ? now : before;
      if (i >= start && now > most) {
        most = now;
        when = i;
      }
      if (i < trace.size()) {
        const MemoryTrace::Event& event = trace.events()[static_cast<std::size_t>(i)];
        const std::int64_t bytes = trace.allocation(event.allocation).bytes;
        now += event.action == MemoryTrace::Action::allocate ? bytes : -bytes;
      }
    }
    EXPECT_EQ(report.held_before, before);
    EXPECT_EQ(report.peak, most - before);
    EXPECT_EQ(report.left, now - before);
    EXPECT_EQ(report.peak_event, when);
    EXPECT_EQ(std::accumulate(report.held.begin(), report.held.end(), std::int64_t{0}), most);
    EXPECT_TRUE(
        std::ranges::is_sorted(report.largest, std::ranges::greater{}, &TracedAllocation::bytes));

    // Whatever the allocator, the sum by kind is what it held at its peak.
    const TraceReport caching = replay(trace, {}, start);
    EXPECT_EQ(std::accumulate(caching.held.begin(), caching.held.end(), std::int64_t{0}),
              caching.held_before + caching.peak);
    EXPECT_EQ(caching.at_peak.allocated, caching.held_before + caching.peak);
    EXPECT_GE(caching.reserved, caching.at_peak.reserved);
    EXPECT_GE(caching.peak + caching.held_before, report.peak + report.held_before);
  }
}

}  // namespace
}  // namespace brim
