#include <brim/need/trace_search.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <stdexcept>

#include "tensors.h"

namespace brim {
namespace {

using tests::kMiB;
using Traced = std::function<MemoryTrace(std::int64_t)>;

/// 10 MiB held before, 3 MiB, then 2 and 4 MiB per item.
MemoryTrace linear(std::int64_t size) {
  MemoryTrace trace;
  trace.allocate(10 * kMiB);
  const std::int64_t constant = trace.allocate(3 * kMiB, {}, trace.place("constant"));
  const std::int64_t first = trace.allocate(2 * size * kMiB, {}, trace.place("first"));
  trace.allocate(4 * size * kMiB, {}, trace.place("second"));
  trace.free(first);
  trace.free(constant);
  return trace;
}

/// Each of its rows is computed at most once, whatever the size.
MemoryTrace no_more_than_all(std::int64_t size) {
  return linear(std::min<std::int64_t>(size, 600));
}

/// Other allocations above some size.
MemoryTrace two_paths(std::int64_t size) {
  MemoryTrace trace = linear(size);
  if (size > 70) {
    trace.allocate(400 * kMiB, {}, trace.place("workspace"));
  }
  return trace;
}

MemoryTrace squares(std::int64_t size) {
  MemoryTrace trace;
  trace.allocate(10 * kMiB);
  trace.allocate(std::min(size * size, std::int64_t{1} << 30) * kMiB, {}, trace.place("square"));
  return trace;
}

/// Frees what was held before.
MemoryTrace frees_first(std::int64_t size) {
  MemoryTrace trace;
  const std::int64_t held = trace.allocate(10 * kMiB);
  trace.free(held);
  trace.allocate(size * kMiB);
  return trace;
}

struct Found {
  std::optional<std::int64_t> best;
  int traces = 0;
};

Found search(const Traced& trace, const AllocatorOptions& options, std::int64_t lower,
             std::int64_t upper) {
  TraceSearch search(options, lower, upper);
  Found found;
  for (; !search.sizes().finished(); ++found.traces) {
    const std::int64_t size = search.sizes().next();
    search.record(size, trace(size), 1, options.capacity);
  }
  found.best = search.sizes().best();
  return found;
}

TEST(TraceSearch, TheLargestFitsTheAllocatorAndTheNextDoesNot) {
  struct Case {
    Traced trace;
    int traces;  // at most
  };
  for (const auto& [trace, traces] :
       {Case{linear, 4}, Case{no_more_than_all, 16}, Case{two_paths, 12}, Case{squares, 6},
        Case{frees_first, 4}}) {
    for (const AllocatorKind kind : {AllocatorKind::exact, AllocatorKind::caching}) {
      const AllocatorOptions options{.kind = kind, .capacity = 1000 * kMiB};
      for (const std::int64_t upper : {1 << 10, 1 << 20}) {
        const Found found = search(trace, options, 1, upper);
        ASSERT_TRUE(found.best);
        EXPECT_TRUE(replay(trace(*found.best), options, 1).fits());
        EXPECT_FALSE(replay(trace(*found.best + 1), options, 1).fits());
        EXPECT_LE(found.traces, traces);
      }
    }
  }
}

TEST(TraceSearch, NothingFitsOrAllDoes) {
  const AllocatorOptions options{.kind = AllocatorKind::exact, .capacity = 15 * kMiB};
  EXPECT_FALSE(search(linear, options, 1, 100).best);
  EXPECT_EQ(search(linear, {.capacity = 1000 * kMiB}, 1, 50).best, 50);
  EXPECT_FALSE(search(linear, {.capacity = 1000 * kMiB}, 500, 1000).best);
}

TEST(TraceSearch, RefusesWrongSizes) {
  EXPECT_THROW(TraceSearch({}, 5, 4), std::invalid_argument);
  EXPECT_THROW(TraceSearch({}, 0, 4), std::invalid_argument);
}

}  // namespace
}  // namespace brim
