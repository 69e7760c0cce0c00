#include "need/need.h"

#include <brim/need/trace.h>
#include <brim/predict/allocator_model.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include "need/memory_simulation.h"

namespace brim {
namespace {

using simulation::Curve;
using simulation::kMiB;
using simulation::Random;

/// A program of requests that are freed in any order.
struct Requests {
  struct Event {
    std::size_t request;
    bool freed;
  };
  std::vector<Curve> bytes;  // by request
  std::vector<Event> events;

  /// Bytes that the program holds at most.
  [[nodiscard]] std::int64_t need(std::int64_t size) const {
    std::int64_t now = 0;
    std::int64_t most = 0;
    for (const Event& event : events) {
      now += (event.freed ? -1 : 1) * bytes[event.request](size);
      most = std::max(most, now);
    }
    return most;
  }

  [[nodiscard]] std::vector<AllocationEvent> log(std::int64_t size) const {
    std::vector<AllocationEvent> log;
    for (const Event& event : events) {
      log.push_back({.address = event.request + 1,
                     .bytes = bytes[event.request](size),
                     .operation = static_cast<std::int32_t>(event.request),
                     .name = event.request + 1,
                     .path = event.request + 1,
                     .freed = event.freed});
    }
    return log;
  }

  /// An attempt that fitted.
  [[nodiscard]] Attempt fit(std::int64_t size) const {
    return {.values = {size}, .peak = need(size), .trace = trace_of(log(size))};
  }

  /// One that failed at the first request that `available` bytes do not hold.
  [[nodiscard]] Attempt failure(std::int64_t size, std::int64_t available) const {
    std::vector<AllocationEvent> noted;
    Attempt attempt{.values = {size}, .outcome = OomKind::device_memory, .peak = 0};
    for (AllocationEvent event : log(size)) {
      if (!event.freed && *attempt.peak + event.bytes > available) {
        event.refused = true;
        noted.push_back(event);
        attempt.requested = event.bytes;
        break;
      }
      *attempt.peak += event.freed ? -event.bytes : event.bytes;
      noted.push_back(event);
    }
    attempt.available = available;
    attempt.trace = trace_of(noted, false);
    return attempt;
  }

  /// Whether calls one after the other fit on an allocator.
  [[nodiscard]] bool fits(std::int64_t size, AllocatorModel device) const {
    device.empty_cache();
    std::vector<std::optional<std::int64_t>> made(bytes.size());
    for (int call = 0; call < 8; ++call) {
      for (const Event& event : events) {
        if (event.freed) {
          device.free(*std::exchange(made[event.request], std::nullopt));
        } else if (made[event.request] = device.allocate(bytes[event.request](size));
                   !made[event.request]) {
          return false;
        }
      }
    }
    return true;
  }
};

Curve constant_bytes(std::int64_t bytes) {
  return [=](std::int64_t) { return bytes; };
}
Curve in_proportion(std::int64_t bytes) {
  return [=](std::int64_t size) { return bytes * size; };
}

using Grow = std::function<Curve(Random&)>;

Curve constant_or_linear(Random& random) {
  return random.coin() ? constant_bytes(random.magnitude(1, 1e8))
                       : in_proportion(random.magnitude(1, 1e6));
}

Curve constant_linear_or_square(Random& random) {
  const std::int64_t unit = random.magnitude(1, 1e4);
  return random.integer(0, 2) == 0 ? [=](std::int64_t size) { return unit * size * size; }
                                   : constant_or_linear(random);
}

Requests random_requests(Random& random, const Grow& grow) {
  Requests result;
  std::vector<std::size_t> held;
  const auto free_one = [&] {
    const auto which = static_cast<std::ptrdiff_t>(random.integer(0, std::ssize(held) - 1));
    result.events.push_back({held[static_cast<std::size_t>(which)], true});
    held.erase(held.begin() + which);
  };
  for (std::int64_t count = random.integer(1, 30); count > 0; --count) {
    result.events.push_back({result.bytes.size(), false});
    held.push_back(result.bytes.size());
    result.bytes.push_back(grow(random));
    while (!held.empty() && random.integer(0, 2) == 0) {
      free_one();
    }
  }
  while (!held.empty()) {
    free_one();
  }
  return result;
}

Need need_of(const std::vector<Attempt>& attempts, const Need::InUse& in_use = {}) {
  return *Need::of_fits(attempts, in_use);
}

TEST(Need, ReproducesThePeakOfItsOwnTrace) {
  Random random(1);
  for (int i = 0; i < 1000; ++i) {
    const Requests program = random_requests(random, constant_linear_or_square);
    const std::int64_t size = random.integer(1, 1000);
    std::vector<Attempt> known{program.fit(size)};
    if (random.coin()) {  // other sizes do not change what is known of this one
      known.insert(known.begin(), program.fit(random.integer(1, 1000)));
    }
    const Need need = need_of(known);
    const auto peak = static_cast<double>(program.need(size));
    ASSERT_EQ(need.upper(static_cast<double>(size)), peak);
    ASSERT_EQ(need.lower(static_cast<double>(size)), peak);
  }
}

TEST(Need, TwoSizesGiveTheNeedAtAThird) {
  Random random(2);
  for (int i = 0; i < 1000; ++i) {
    const Requests program = random_requests(random, constant_linear_or_square);
    const std::int64_t small = random.integer(20, 200);
    const std::int64_t large = 2 * small + random.integer(0, 200);
    const Need need = random.coin() ? need_of({program.fit(small), program.fit(large)})
                                    : need_of({program.fit(large), program.fit(small)});
    const std::int64_t third = random.integer(1, 2 * large);
    const auto exact = static_cast<double>(program.need(third));
    ASSERT_EQ(need.known(), 1.0);
    // Bytes are rounded up, request by request.
    const auto requests = static_cast<double>(program.bytes.size());
    ASSERT_NEAR(need.upper(static_cast<double>(third)), exact, requests + 1e-9 * exact);
    const double lower = need.lower(static_cast<double>(third));
    ASSERT_LE(lower, exact + requests + 1e-9 * exact);
    if (third >= small) {  // below both sizes a need may be less than a line
      ASSERT_NEAR(lower, exact, requests + 1e-9 * exact);
    }
  }
}

TEST(Need, LowerBoundHoldsBelowBothSizesOfANeedThatFlattensOut) {
  const auto need = [](double size) { return 1e6 * std::sqrt(size); };
  const auto fit = [&](std::int64_t size) {
    return simulation::attempt(
        [&](std::int64_t s) { return static_cast<std::int64_t>(need(static_cast<double>(s))); },
        size, std::int64_t{1} << 40);
  };
  const Need known = need_of({fit(500), fit(600)});
  for (double size = 1; size < 500; ++size) {
    EXPECT_LE(known.lower(size), need(size));
  }
}

TEST(Need, AFailureIsASecondSizeForWhatItReached) {
  Random random(3);
  for (int i = 0; i < 1000; ++i) {
    // Each request has its own bytes, so none is taken for another.
    std::int64_t next = 0;
    const Requests program =
        random_requests(random, [&](Random&) { return in_proportion(100'000 + 17 * ++next); });
    const std::int64_t size = random.integer(100, 200);
    const std::int64_t available =
        program.need(size) + random.integer(0, program.need(2 * size) - program.need(size) - 1);
    const Attempt failed = program.failure(2 * size, available);
    const Need need = need_of({failed, program.fit(size)});
    double all = 0;
    double reached = 0;
    for (std::size_t r = 0; r < program.bytes.size(); ++r) {
      all += static_cast<double>(program.bytes[r](size));
      reached +=
          r < failed.trace->requests.size() ? static_cast<double>(program.bytes[r](size)) : 0;
    }
    ASSERT_NEAR(need.known(), reached / all, 1e-9);
    const auto exact = static_cast<double>(program.need(3 * size));
    ASSERT_GE(need.upper(3.0 * static_cast<double>(size)), exact - 40.0);
    ASSERT_NEAR(need.upper(3.0 * static_cast<double>(size), Need::kInProportion), exact, 40.0);
    ASSERT_LE(need.lower(3.0 * static_cast<double>(size)), exact + 40);
  }
}

TEST(Need, UnknownGrowthIsBetweenItsBounds) {
  Random random(4);
  for (int i = 0; i < 1000; ++i) {
    const Requests program = random_requests(random, constant_or_linear);
    const std::int64_t size = random.integer(10, 1000);
    const Need need = need_of({program.fit(size)});
    ASSERT_EQ(need.known(), 0);
    const std::int64_t other = random.integer(1, 3000);
    const auto exact = static_cast<double>(program.need(other));
    const auto requests = static_cast<double>(program.bytes.size());
    ASSERT_LE(need.lower(static_cast<double>(other)), exact + requests);
    ASSERT_GE(need.upper(static_cast<double>(other)), exact - requests);
  }
}

TEST(Need, WhatOneSizeShowsGrowsAsWhatHasTheSameBytes) {
  // The failure has reached the activation, not its gradient.
  const Requests program{
      .bytes = {in_proportion(1000), constant_bytes(30'000), in_proportion(1000)},
      .events = {{0, false}, {1, false}, {2, false}}};
  const Need need = need_of({program.failure(20, 35'000), program.fit(10)});
  EXPECT_LT(need.known(), 1);
  EXPECT_EQ(need.upper(30), 90'000);
}

TEST(Need, ASquareGrowsOnFarBeyondTwoNearSizes) {
  const Requests program{.bytes = {[](std::int64_t size) { return 3 * size * size; }},
                         .events = {{0, false}, {0, true}}};
  EXPECT_NEAR(need_of({program.fit(365), program.fit(779)}).upper(10'370), 3e0 * 10'370 * 10'370,
              10);
}

/// One of which only the bytes are known.
Attempt peak_of(std::int64_t size, std::int64_t bytes) { return {.values = {size}, .peak = bytes}; }

TEST(Need, PeaksBoundASumOfWhatGrowsWithASquareAtMost) {
  Random random(6);
  for (int i = 0; i < 1000; ++i) {
    const Requests program = random_requests(random, constant_linear_or_square);
    const auto sum = [&](std::int64_t size) {
      std::int64_t all = 0;
      for (const Curve& each : program.bytes) {
        all += each(size);
      }
      return all;
    };
    std::vector<Attempt> known;
    std::int64_t size = 0;
    for (int fits = 0; fits < 3; ++fits) {
      size += random.integer(1, 200);
      known.push_back(peak_of(size, sum(size)));
    }
    const std::int64_t other = size + random.integer(0, 1000);
    ASSERT_GE(need_of(known).upper(static_cast<double>(other)) * (1 + 1e-9) + 1,
              static_cast<double>(sum(other)));
  }
}

TEST(Need, PeaksGrowAsTheNearestSmallerOneShowsWhateverCameFirst) {
  // Another kernel serves the smallest size: what it shows of larger ones is too little.
  const Attempt far = peak_of(2, 600);
  const Attempt near = peak_of(8, 800);
  const Attempt newest = peak_of(10, 1000);
  EXPECT_EQ(need_of({far, near, newest}).upper(20, Need::kInProportion), 2000);
  EXPECT_EQ(need_of({near, far, newest}).upper(20, Need::kInProportion), 2000);
}

TEST(Need, WhatAnUnrecordedFailureHeldIsNotWhatItsSizeNeeds) {
  const Attempt failed{
      .values = {20}, .outcome = OomKind::device_memory, .peak = 100, .requested = 1000};
  const Need need = need_of({failed, peak_of(10, 1000)});
  EXPECT_EQ(need.known(), 0);
  EXPECT_EQ(need.upper(15), 2250);
}

TEST(Need, WhatAnUnrecordedCallLeftCountsAsFarAsItIsStillThere) {
  Attempt attempt = peak_of(10, 1000);
  attempt.left = 300;
  attempt.available = 5000;
  const auto upper = [&](std::optional<std::int64_t> available) {
    const std::vector<Attempt> known{attempt};
    return Need::of_fits(known, {}, available)->upper(10);
  };
  EXPECT_EQ(upper(5000), 1000) << "the caller has dropped the result";
  EXPECT_EQ(upper(4700), 700) << "gradients, which the next call replaces";
  EXPECT_EQ(upper(4000), 700) << "the rest is not the call's";
  EXPECT_EQ(upper({}), 1000);
}

TEST(Need, PeaksOfCallsThatFoundOtherBytesAreComparedOnTheSafeSide) {
  // The first call left 400, which the second freed first: its peak is lower by that.
  const Attempt first = peak_of(10, 1400);
  Attempt second = peak_of(20, 1600);
  second.held = 400;
  EXPECT_EQ(need_of({first, second}).upper(30, Need::kInProportion), 2200);
  EXPECT_GE(need_of({first, second}).upper(30), 2200);
  second.held = -400;  // others have freed memory: that says nothing of the call
  EXPECT_EQ(need_of({first, second}).upper(30, Need::kInProportion), 1800);
}

TEST(Need, APeakIsATraceToo) {
  const Need one = need_of({peak_of(10, 1000)});
  EXPECT_FALSE(one.recorded());
  EXPECT_EQ(one.upper(20), 4000);
  EXPECT_EQ(one.upper(20, Need::kInProportion), 2000);
  EXPECT_EQ(one.lower(20), 1000);
  const Need two = need_of({peak_of(10, 1000), peak_of(20, 1500)});
  EXPECT_EQ(two.upper(30, Need::kInProportion), 2000);
  EXPECT_GE(two.upper(30), 2000) << "it may be a sum of squares";
  const std::vector<Attempt> unknown{{.values = {10}}};
  EXPECT_FALSE(Need::of_fits(unknown, {}));
  EXPECT_FALSE(Need::of_fits({}, {}));
}

TEST(Need, AFailureThatWasNotForeseenRaisesTheNeedAboveTheFit) {
  const Requests program{.bytes = {in_proportion(100)}, .events = {{0, false}, {0, true}}};
  Attempt failed{.values = {20},
                 .outcome = OomKind::device_memory,
                 .peak = 1000,
                 .requested = 1600,
                 .expected = 2000};
  const std::vector<Attempt> fits{program.fit(5), program.fit(10)};
  const Need need = need_of({fits[0], failed, fits[1]});
  EXPECT_EQ(need.upper(20), 2600);
  EXPECT_EQ(need.upper(15), 1800);
  EXPECT_EQ(need.upper(10), 1000) << "what has fitted is not in doubt";
  EXPECT_EQ(need_of({failed, fits[0], fits[1]}).upper(20), 2000) << "newer fits know better";
}

TEST(Need, WhatTheLastCallLeftIsReplaced) {
  // A gradient that the next call frees first, and an output that stays until the next is made.
  const auto call = [](std::uintptr_t gradient, std::uintptr_t output, const Trace* before) {
    std::vector<AllocationEvent> events;
    if (before != nullptr) {
      events.push_back({.address = gradient - 1, .bytes = 500, .freed = true});
    }
    events.push_back({.address = 99, .bytes = 2000, .operation = 0, .name = 1, .path = 1});
    events.push_back({.address = gradient, .bytes = 500, .operation = 1, .name = 2, .path = 2});
    events.push_back({.address = 99, .bytes = 2000, .freed = true});
    events.push_back({.address = output, .bytes = 300, .operation = 2, .name = 3, .path = 3});
    if (before != nullptr) {
      events.push_back({.address = output - 1, .bytes = 300, .freed = true});
    }
    return events;
  };
  const auto nothing = [](std::int64_t) { return false; };
  const auto first = trace_of(call(1, 11, nullptr), true, nullptr, {}, nothing);
  const std::unordered_set<std::int64_t> left{2, 12};
  const auto in_use = [&](std::int64_t address) { return left.contains(address); };
  const auto second = trace_of(call(2, 12, first.get()), true, first.get(), {}, in_use);
  const Attempt attempt{.values = {10}, .peak = 2000, .trace = second};
  EXPECT_EQ(need_of({attempt}, in_use).upper(10), 2000) << "as the second: 500 less, 2500 more";
  EXPECT_EQ(need_of({attempt}, nothing).upper(10), 2500) << "the caller has freed it: less is held";
}

TEST(Need, WhatAFailedAttemptHadMadeIsHeldUntilTheCallFreesIt) {
  // The newest call freed a block of a failed attempt, which the next one has to make.
  Trace trace;
  trace.requests = {{.bytes = 500, .operation = 0, .name = 1, .freed = true, .from_failure = true},
                    {.bytes = 1000, .operation = 1, .name = 2, .freed = true}};
  trace.older = 1;
  trace.events = {~0, 1, ~1};
  Attempt fit{.values = {10}, .peak = 1000, .trace = std::make_shared<const Trace>(trace)};
  EXPECT_EQ(Need::of_fits({{fit}}, {})->upper(10), 1000);
  trace.events = {1, ~0, ~1};
  fit.trace = std::make_shared<const Trace>(trace);
  EXPECT_EQ(Need::of_fits({{fit}}, {})->upper(10), 1500);
}

TEST(Need, FitsAnAllocatorWhereTheProgramDoes) {
  Random random(5);
  int fitting = 0;
  constexpr int kCases = 600;
  for (int i = 0; i < kCases; ++i) {
    const Requests program = random_requests(random, [](Random& each) {
      return each.coin() ? constant_bytes(each.magnitude(1e3, 1e8))
                         : in_proportion(each.magnitude(1e2, 1e6));
    });
    const std::int64_t small = random.integer(20, 60);
    const std::int64_t large = 2 * small;
    const std::int64_t size = random.integer(small / 2, 2 * large);
    AllocatorModel device({.capacity = std::max<std::int64_t>(
                               static_cast<std::int64_t>(static_cast<double>(program.need(size)) *
                                                         random.real(0.9, 1.4)),
                               8 * kMiB)});
    // Something else lies in the allocator's segments, between free blocks.
    std::vector<std::optional<std::int64_t>> others;
    for (int each = 0; each < 10; ++each) {
      others.push_back(device.allocate(random.magnitude(1e3, 3e6)));
    }
    for (std::size_t each = 0; each < others.size(); each += 2) {
      if (others[each]) {
        device.free(*others[each]);
      }
    }
    const bool fits = program.fits(size, device);
    fitting += fits ? 1 : 0;
    const Need need = need_of({program.fit(small), program.fit(large)});
    if (size != large) {
      ASSERT_EQ(need.fits(static_cast<double>(size), device), fits) << i;
    }
  }
  EXPECT_GT(fitting, kCases / 5);
  EXPECT_LT(fitting, kCases * 4 / 5);
}

TEST(Need, AWorkspaceThatTheWorkCanDoWithoutNeedNotFit) {
  const auto need = [](bool tolerates_refusal) {
    std::vector<AllocationEvent> log;
    if (tolerates_refusal) {
      log.push_back({.bytes = 4000 * kMiB, .operation = 0, .name = 1, .path = 1, .refused = true});
    }
    log.push_back({.address = 1, .bytes = 1000 * kMiB, .operation = 0, .name = 1, .path = 1});
    log.push_back({.address = 1, .bytes = 1000 * kMiB, .freed = true});
    log.push_back({.address = 2, .bytes = 500 * kMiB, .operation = 1, .name = 2, .path = 2});
    log.push_back({.address = 3, .bytes = 100 * kMiB, .operation = 2, .name = 3, .path = 3});
    log.push_back({.address = 2, .bytes = 500 * kMiB, .freed = true});
    log.push_back({.address = 3, .bytes = 100 * kMiB, .freed = true});
    return need_of({{.values = {10}, .peak = 1000 * kMiB, .trace = trace_of(log)}});
  };
  EXPECT_TRUE(need(true).fits(10, AllocatorModel({.capacity = 600 * kMiB})));
  EXPECT_FALSE(need(true).fits(10, AllocatorModel({.capacity = 500 * kMiB})));
  EXPECT_FALSE(need(false).fits(10, AllocatorModel({.capacity = 600 * kMiB})));
}

TEST(RequestGrowth, LowerBoundHoldsForRequestsOfEveryKind) {
  using Bytes = std::function<double(double)>;
  const auto padded = [](double size, double to) { return std::ceil(size / to) * to; };
  const std::vector<std::pair<const char*, Bytes>> kinds{
      {"in proportion", [](double s) { return 24 * s; }},
      {"constant", [](double) { return 4096.0; }},
      {"line", [](double s) { return 5000 + 12 * s; }},
      {"flattens out", [](double s) { return 4 * std::min(s, 100.0); }},
      {"root", [](double s) { return std::floor(1000 * std::sqrt(s)); }},
      {"square", [](double s) { return 4 * s * s; }},
      {"pairs", [](double s) { return 2 * s * (s + 1); }},
      {"linear and square", [](double s) { return 1000 * s + s * s; }},
      {"cube", [](double s) { return s * s * s; }},
      {"padded to 8", [&](double s) { return 24 * padded(s, 8); }},
      {"padded to 64", [&](double s) { return 24 * padded(s, 64); }},
      {"padded and constant", [&](double s) { return 777 + 24 * padded(s, 64); }}};
  Random random(5);
  for (const auto& [name, bytes] : kinds) {
    for (int i = 0; i < 3000; ++i) {
      const auto size = static_cast<double>(random.magnitude(1, 2000));
      const double here = size + static_cast<double>(random.magnitude(1, 2000));
      const double there = here + static_cast<double>(random.magnitude(1, 4000));
      const detail::RequestGrowth known(bytes(here), here, bytes(there), there);
      const auto least = static_cast<double>(known.least_at(size));
      ASSERT_LE(least, bytes(size)) << name << " " << size << " from " << here << ", " << there;
      ASSERT_LE(static_cast<double>(detail::RequestGrowth::least_of(bytes(here), here, size)),
                bytes(size))
          << name << " " << size << " from " << here;
    }
  }
}

TEST(Need, FailuresBoundWhatSmallerSizesNeed) {
  // The first request is seen to fail twice: half of the size needs half of it, which does not fit
  // either. What only one failure has come to may grow faster.
  const auto failed = [](std::int64_t size, bool further) {
    std::vector<AllocationEvent> log{
        {.address = 1, .bytes = 40 * size, .operation = 0, .name = 1, .path = 1}};
    if (further) {
      log.push_back({.address = 2, .bytes = 800 * size, .operation = 1, .name = 2, .path = 2});
    }
    log.back().refused = true;
    return Attempt{.values = {size},
                   .outcome = OomKind::device_memory,
                   .peak = further ? 40 * size : 0,
                   .requested = log.back().bytes,
                   .trace = trace_of(log, false)};
  };
  const std::vector<Attempt> attempts{failed(1000, false), failed(500, true)};
  const auto need = Need::of_failure(attempts.back(), attempts, {});
  ASSERT_TRUE(need);
  EXPECT_EQ(need->lower(500), 840 * 500);
  const double rounding = 0.05;  // a request that grows slightly faster counts as in proportion
  EXPECT_NEAR(need->lower(250), 40 * 250 + 800 * 500 / 8, rounding * 40 * 250);
  EXPECT_LE(need->lower(249), 40 * 200 + 800 * 500 / 27) << "more parts of it, if it is padded";
  Attempt without_trace = attempts.front();
  without_trace.trace = nullptr;
  without_trace.left = 8000;
  EXPECT_EQ(Need::of_failure(without_trace, attempts, {})->lower(500), (40'000 - 8000) / 8);
  without_trace.requested.reset();
  EXPECT_FALSE(Need::of_failure(without_trace, attempts, {}));
}

}  // namespace
}  // namespace brim
