// What was traced on fake tensors, as one more observation of the need.

#include <brim/need/size_search.h>
#include <brim/need/trace.h>
#include <brim/need/trace_search.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "need/need.h"
#include "tensors.h"

namespace brim {
namespace {

constexpr std::int64_t kGradient = 1000;
constexpr std::int64_t kActivation = 100;  // of an item

/// Two calls of a training step: the first makes an optimizer's state, the second frees the
/// gradient first.
MemoryTrace traced(std::int64_t size, std::int64_t activation = kActivation,
                   std::int64_t temporary = 0) {
  MemoryTrace trace;
  const auto make = [&](std::int64_t bytes, const char* place) {
    return trace.allocate(bytes, MemoryKind::other, trace.place(place));
  };
  make(50, "weight");
  std::int64_t gradient = -1;
  for (const bool first : {true, false}) {
    if (!first) {
      trace.begin_call();
      trace.free(gradient);
    }
    const std::int64_t kept = make(activation * size, "forward");
    if (temporary > 0) {
      trace.free(make(temporary, "forward"));
    }
    gradient = make(kGradient, "backward");
    trace.free(kept);
    if (first) {
      make(kGradient, "optimizer");
    }
  }
  return trace;
}

std::vector<Attempt> foreseen(std::int64_t available, std::int64_t activation = kActivation,
                              std::int64_t temporary = 0) {
  TraceSearch search({.kind = AllocatorKind::exact}, 1, 1000);
  for (const std::int64_t size : {1000, 500}) {
    search.record(size, traced(size, activation, temporary), 1, 50 + available);
  }
  return search.traced();
}

/// The first call of a run, in whose operators are others.
Attempt run(std::int64_t size, std::int64_t available, std::int64_t temporary = 0) {
  const std::int64_t activation = kActivation * size;
  std::vector<AllocationEvent> events{
      {.address = 1, .bytes = activation, .operation = 0, .name = 11, .path = 11}};
  if (temporary > 0) {
    events.push_back({.address = 4, .bytes = temporary, .operation = 0, .name = 11, .path = 14});
    events.push_back({.address = 4, .bytes = temporary, .freed = true});
  }
  const AllocationEvent rest[]{
      {.address = 2, .bytes = kGradient, .operation = 1, .name = 12, .path = 12},
      {.address = 1, .bytes = activation, .freed = true},
      {.address = 3, .bytes = kGradient, .operation = 2, .name = 13, .path = 13}};
  events.insert(events.end(), std::begin(rest), std::end(rest));
  return {.values = {size},
          .peak = activation + kGradient,
          .left = 2 * kGradient,
          .available = available,
          .trace = trace_of(events)};
}

TEST(ForeseenTrace, TheFirstSizeComesFromItAndItIsNeitherAFitNorAFailure) {
  // Both calls: a state, a gradient and the activations.
  const std::int64_t available = 40'000;
  SizeSearch search({.upper = 1000, .circumstances = {.available = available}});
  search.remember(foreseen(available));
  const std::int64_t largest = (available - 2 * kGradient) / kActivation;
  EXPECT_LE(search.next(), largest);
  EXPECT_GE(search.next(), largest - largest / 50);
  EXPECT_FALSE(search.best());
  EXPECT_FALSE(search.smallest_failure());
  EXPECT_FALSE(search.finished());
}

TEST(ForeseenTrace, OneTracedSizeIsEnoughForAFirstSize) {
  const std::int64_t available = 40'000;
  TraceSearch traces({.kind = AllocatorKind::exact}, 1, 1000);
  traces.record(1000, traced(1000), 1, 50 + available);
  SizeSearch search({.upper = 1000, .circumstances = {.available = available}});
  search.remember(traces.traced());
  const std::int64_t largest = (available - 2 * kGradient) / kActivation;
  EXPECT_GE(search.next(), largest - largest / 20);
  EXPECT_LE(search.next(), largest + largest / 20);
}

TEST(ForeseenTrace, AFailureRaisesItAndAFitTakesOver) {
  const std::int64_t available = 40'000;
  SizeSearch search({.upper = 1000, .circumstances = {.available = available}});
  search.remember(foreseen(available, kActivation / 2));
  EXPECT_GT(search.next(), 700) << "a half is missing";
  while (kActivation * search.next() + kGradient > available) {
    ASSERT_LT(search.attempts(), 3) << "one more than halving";
    search.record({.values = {search.next()},
                   .outcome = OomKind::host_memory,
                   .peak = 0,
                   .requested = kActivation * search.next(),
                   .available = available});
  }
  const std::int64_t found = search.next();
  EXPECT_GT(found, 350);
  search.record(run(found, available));
  EXPECT_EQ(search.best(), found);
}

TEST(ForeseenTrace, ARunGrowsAsItAndFreesFirstWhatItFrees) {
  const std::int64_t available = 40'000;
  std::vector<Attempt> attempts = foreseen(available);
  attempts.push_back(run(300, available));
  // The state has the bytes of the gradient, but stays.
  const auto in_use = [](std::int64_t address) { return address > 1; };
  const auto need = Need::of_fits(attempts, in_use, available - 2 * kGradient);
  ASSERT_TRUE(need);
  EXPECT_FALSE(need->foreseen());
  EXPECT_EQ(need->known(), 1);
  for (const std::int64_t size : {100, 300, 370, 900}) {
    // The gradient is freed before the activations are there, and made again beside them.
    EXPECT_EQ(need->upper(static_cast<double>(size)), kActivation * size) << size;
  }
  // Something else has freed the gradient since.
  const auto only_state = [](std::int64_t address) { return address == 3; };
  const auto later = Need::of_fits(attempts, only_state, available - kGradient);
  EXPECT_EQ(later->upper(370), kActivation * 370 + kGradient);
}

TEST(ForeseenTrace, WhatARunFreesFirstMakesRoomForWhatItMakesBefore) {
  const std::int64_t available = 40'000;
  constexpr std::int64_t kTemporary = 5000;  // at the end of the forward pass
  std::vector<Attempt> attempts = foreseen(available, kActivation, kTemporary);
  attempts.push_back(run(300, available, kTemporary));
  const auto in_use = [](std::int64_t address) { return address == 2 || address == 3; };
  const auto need = Need::of_fits(attempts, in_use, available - 2 * kGradient);
  EXPECT_EQ(need->upper(370), kActivation * 370 + kTemporary - kGradient);
}

/// The same with so many times the bytes, and with what it leaves elsewhere.
Attempt scaled(Attempt attempt, std::int64_t times, std::span<const std::int64_t> addresses) {
  Trace trace = *attempt.trace;
  for (Trace::Request& request : trace.requests) {
    request.bytes *= times;
    if (!request.freed && !trace.foreseen) {
      request.address = addresses.front();
      addresses = addresses.subspan(1);
    }
  }
  *attempt.peak *= times;
  *attempt.available *= times;
  attempt.trace = std::make_shared<const Trace>(trace);
  return attempt;
}

TEST(ForeseenTrace, OnADeviceWhatARunFreesFirstMakesRoomToo) {
  constexpr std::int64_t kUnit = 2 * tests::kMiB;  // a block is a segment of its own
  const std::int64_t available = 40'000;
  AllocatorModel device({.capacity = available * kUnit});
  const std::int64_t gradient = device.block(*device.allocate(kGradient * kUnit)).address;
  const std::int64_t state = device.block(*device.allocate(kGradient * kUnit)).address;
  std::vector<Attempt> attempts = foreseen(available);
  attempts.push_back(run(300, available));
  for (Attempt& attempt : attempts) {
    attempt = scaled(attempt, kUnit, std::vector{gradient, state});
  }
  const auto in_use = [](std::int64_t) { return true; };
  const auto need = Need::of_fits(attempts, in_use);
  EXPECT_TRUE(need->fits(380, device)) << "beside the state, and a new gradient in the old one";
  EXPECT_FALSE(need->fits(381, device));
}

TEST(ForeseenTrace, WhatWasHeldBeforeAndIsFreedMakesRoom) {
  const auto step = [](std::int64_t size) {
    MemoryTrace trace;
    const std::int64_t held = trace.allocate(500, MemoryKind::other, trace.place("before"));
    trace.free(held);
    trace.free(trace.allocate(kActivation * size, MemoryKind::other, trace.place("forward")));
    return trace;
  };
  TraceSearch search({.kind = AllocatorKind::exact}, 1, 1000);
  for (const std::int64_t size : {1000, 500}) {
    search.record(size, step(size), 1, 40'000);
  }
  const auto need = Need::of_fits(search.traced(), {}, 39'500);
  EXPECT_EQ(need->upper(300), kActivation * 300 - 500);
}

TEST(ForeseenTrace, OnADeviceWhatCallsHaveLeftIsNotNeededAgainEither) {
  const std::int64_t available = 40'000;
  const auto attempts = foreseen(available);
  const auto need = Need::of_fits(attempts, {}, available - 2 * kGradient);
  const AllocatorModel device(
      {.kind = AllocatorKind::exact, .capacity = available - 2 * kGradient});
  EXPECT_TRUE(need->fits(380, device, Need::kInProportion, true));
  EXPECT_FALSE(need->fits(381, device, Need::kInProportion, true));
}

TEST(ForeseenTrace, WhatCallsHaveLeftIsNotNeededAgain) {
  const std::int64_t available = 40'000;
  const auto attempts = foreseen(available);
  EXPECT_EQ(Need::of_fits(attempts, {}, available)->upper(300), 30'000 + 2 * kGradient);
  EXPECT_EQ(Need::of_fits(attempts, {}, available - 2 * kGradient)->upper(300), 30'000);
  EXPECT_EQ(Need::of_fits(attempts, {}, available / 2)->upper(300), 30'000) << "others' memory";
}

TEST(ForeseenTrace, ALaterCallIsToldFromTheFirst) {
  const auto trace = trace_of(traced(7), 1);
  EXPECT_TRUE(trace->foreseen);
  ASSERT_EQ(trace->later, 4U);
  EXPECT_EQ(trace->events[trace->later], ~1) << "the gradient";
  EXPECT_EQ(trace->requests[1].successor, 4);
  EXPECT_EQ(trace->requests[2].successor, Trace::kNone) << "the state";
}

}  // namespace
}  // namespace brim
