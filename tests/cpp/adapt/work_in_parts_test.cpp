// Work that goes through its items in parts of the size and keeps a result of each, as
// torch.cat([f(part) for part in x.split(size)]) does. Its need is no line, and not even monotone:
// it grows in proportion to the size as long as the number of parts stays the same, and falls where
// there is one less.

#include <brim/adapt/size_memory.h>
#include <brim/need/size_search.h>
#include <brim/predict/allocation_record.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "adapt/memory_simulation.h"

namespace brim {
namespace {

using namespace simulation;

struct InParts {
  std::int64_t items;
  std::int64_t temporary;  // bytes per item of a part, while it runs
  std::int64_t result;     // bytes per item, kept
  bool concatenates;       // all results once more at the end

  [[nodiscard]] Attempt run(std::int64_t size, std::int64_t available, bool records) const {
    std::vector<AllocationEvent> events;
    Attempt attempt{.values = {size}, .peak = 0, .available = available};
    std::int64_t used = 0;
    const auto allocate = [&](std::int64_t bytes) {
      if (!attempt.fitted()) {
        return;
      }
      if (used + bytes > available) {
        attempt.outcome = OomKind::device_memory;
        attempt.peak = used;
        attempt.requested = bytes;
        return;
      }
      used += bytes;
      ++attempt.allocations;
      if (records) {
        events.push_back({static_cast<std::uintptr_t>(attempt.allocations), bytes});
      }
      attempt.peak = std::max(*attempt.peak, used);
    };
    for (std::int64_t start = 0; start < items && attempt.fitted(); start += size) {
      const std::int64_t part = std::min(size, items - start);
      allocate(temporary * part);
      const auto first = static_cast<std::uintptr_t>(attempt.allocations);
      allocate(result * part);
      used -= temporary * part;
      if (records) {
        events.push_back({first, temporary * part, 0, true});
      }
    }
    if (concatenates) {
      allocate(result * items);
    }
    if (records && attempt.fitted()) {
      attempt.record = record_of(events);
    }
    return attempt;
  }
};

struct Called {
  int failures = 0;
  std::int64_t size = 0;
};

Called call(const InParts& work, Strategy strategy, std::int64_t available, bool records,
            std::vector<Attempt>& memory) {
  SizeSearch search({.strategy = strategy, .upper = work.items, .available = available});
  search.remember(memory);
  for (Called result;; ++result.failures) {
    result.size = search.next();
    Attempt attempt = work.run(result.size, available, records);
    const bool fitted = attempt.fitted();
    search.record(attempt);
    add_attempt(memory, std::move(attempt));
    if (fitted) {
      return result;
    }
  }
}

struct Promise {
  int near;         // the call from which on the size is near the largest
  double failures;  // share of the calls from the second on that may fail
  double below;     // share of the cases that may stay below
};

void hold_in_parts(bool records, const Promise& promise) {
  constexpr int kCases = 1000;
  constexpr int kCalls = 8;
  Random random(5);
  int later_failures = 0;
  int below = 0;
  for (int i = 0; i < kCases; ++i) {
    const InParts work{.items = random.magnitude(300, 2e4),
                       .temporary = random.magnitude(64, 4096),
                       .result = random.magnitude(1, 512),
                       .concatenates = random.coin()};
    const auto need = [&](std::int64_t size) { return *work.run(size, kHuge, false).need(); };
    const std::int64_t least = need(1);
    const std::int64_t available =
        least + 1 +
        static_cast<std::int64_t>(static_cast<double>(need(work.items) - least) *
                                  random.real(0.02, 0.95));
    if (need(work.items) <= available) {
      continue;
    }
    std::int64_t largest = work.items;
    while (need(largest) > available) {
      --largest;
    }
    std::vector<Attempt> memory;
    const Called halving = call(work, Strategy::halving, available, false, memory);
    memory.clear();
    std::vector<std::int64_t> sizes;
    for (int c = 0; c < kCalls; ++c) {
      const Called ours = call(work, Strategy::predictive, available, records, memory);
      if (c == 0) {
        ASSERT_LE(ours.failures, halving.failures + 1);
        ASSERT_GE(ours.size, halving.size);
      } else {
        later_failures += ours.failures;
      }
      sizes.push_back(ours.size);
    }
    // Beyond sizes that fail there may be some that fit, with a part less. No measurement of
    // smaller ones tells: a size that fills the memory is as good as the largest.
    below += std::any_of(sizes.begin() + promise.near - 1, sizes.end(), [&](std::int64_t size) {
      const bool fills = share(need(size), available) >= 0.97;
      return !fills && share(size + 1, largest) < 0.97;
    });
  }
  EXPECT_LE(later_failures, promise.failures * kCases * (kCalls - 1));
  EXPECT_LE(below, promise.below * kCases);
}

TEST(WorkInParts, FailsInTheFirstCallOnlyAndComesNearTheLargestSize) {
  hold_in_parts(true, {.near = 3, .failures = 0.001, .below = 0.01});
}

// Where the requests are too many, or another call is recorded.
TEST(WorkInParts, ComesNearTheLargestSizeWithoutRecordsToo) {
  hold_in_parts(false, {.near = 8, .failures = 0.003, .below = 0.05});
}

}  // namespace
}  // namespace brim
