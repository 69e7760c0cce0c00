// Work that goes through its items in parts of the size and keeps a result of each, as
// torch.cat([f(part) for part in x.split(size)]) does. Its need is no line, and not even monotone:
// it grows in proportion to the size as long as the number of parts stays the same, and falls where
// there is one less.

#include <brim/adapt/size_memory.h>
#include <brim/adapt/size_search.h>
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

  [[nodiscard]] Attempt run(std::int64_t size, std::int64_t available) const {
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
      attempt.peak = std::max(*attempt.peak, used);
    };
    for (std::int64_t start = 0; start < items && attempt.fitted(); start += size) {
      const std::int64_t part = std::min(size, items - start);
      allocate(temporary * part);
      allocate(result * part);
      used -= temporary * part;
    }
    if (concatenates) {
      allocate(result * items);
    }
    return attempt;
  }
};

struct Called {
  int failures = 0;
  std::int64_t size = 0;
};

Called call(const InParts& work, Strategy strategy, std::int64_t available,
            std::vector<Attempt>& memory) {
  SizeSearch search({.strategy = strategy, .upper = work.items, .available = available});
  search.remember(memory);
  for (Called result;; ++result.failures) {
    result.size = search.next();
    Attempt attempt = work.run(result.size, available);
    const bool fitted = attempt.fitted();
    search.record(attempt);
    add_attempt(memory, std::move(attempt));
    if (fitted) {
      return result;
    }
  }
}

TEST(WorkInParts, FailsInTheFirstCallOnlyAndComesNearTheLargestSize) {
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
    const auto need = [&](std::int64_t size) { return *work.run(size, kHuge).need(); };
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
    const Called halving = call(work, Strategy::halving, available, memory);
    memory.clear();
    std::vector<std::int64_t> sizes;
    for (int c = 0; c < kCalls; ++c) {
      const Called ours = call(work, Strategy::predictive, available, memory);
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
    const std::int64_t last = sizes.back();
    const bool fills = share(need(last), available) >= 0.97;
    below += fills || share(last + 1, largest) >= 0.97 ? 0 : 1;
  }
  EXPECT_LE(later_failures, 0.002 * kCases * (kCalls - 1));
  EXPECT_LE(below, 0.05 * kCases);
}

}  // namespace
}  // namespace brim
