#include <brim/predict/scaled_trace.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <stdexcept>

namespace brim {
namespace {

constexpr std::int64_t kScaledMiB = std::int64_t{1} << 20;

/// 10 MiB held before, 3 MiB, then 2 and 4 MiB per item.
MemoryTrace trace_at(std::int64_t size) {
  MemoryTrace trace;
  trace.allocate(10 * kScaledMiB);
  const std::int64_t constant = trace.allocate(3 * kScaledMiB);
  const std::int64_t first = trace.allocate(2 * size * kScaledMiB);
  trace.allocate(4 * size * kScaledMiB);
  trace.free(first);
  trace.free(constant);
  return trace;
}

TEST(ScaledTrace, EachAllocationGrowsAsItDid) {
  const MemoryTrace small = trace_at(3);
  const MemoryTrace large = trace_at(7);
  const auto found = scaled({large, 7, 1}, {small, 3, 1}, 50);
  ASSERT_TRUE(found);
  const MemoryTrace expected = trace_at(50);
  ASSERT_EQ(found->size(), expected.size());
  for (std::int64_t i = 0; i < 4; ++i) {
    EXPECT_EQ(found->allocation(i).bytes, expected.allocation(i).bytes) << i;
  }
}

TEST(ScaledTrace, IsEmptyWhereTheEventsDiffer) {
  const MemoryTrace small = trace_at(3);
  MemoryTrace large = trace_at(7);
  large.allocate(5);
  EXPECT_FALSE(scaled({large, 7, 1}, {small, 3, 1}, 50));
  EXPECT_FALSE(largest_scaled({large, 7, 1}, {small, 3, 1}, {}, 1, 100));
}

TEST(ScaledTrace, TheLargestIsThatOfTheAllocator) {
  const MemoryTrace small = trace_at(3);
  const MemoryTrace large = trace_at(7);
  for (const AllocatorKind kind : {AllocatorKind::exact, AllocatorKind::caching}) {
    const AllocatorOptions options{.kind = kind, .capacity = 1000 * kScaledMiB};
    std::int64_t largest = 0;
    for (std::int64_t size = 1; size < 300; ++size) {
      largest = replay(trace_at(size), options, 1).fits() ? size : largest;
    }
    EXPECT_EQ(largest_scaled({large, 7, 1}, {small, 3, 1}, options, 1, 1000), largest);
    EXPECT_EQ(largest_scaled({large, 7, 1}, {small, 3, 1}, options, 1, 50), 50);
    EXPECT_EQ(largest_scaled({large, 7, 1}, {small, 3, 1}, options, 500, 1000), 499);
  }
}

TEST(ScaledTrace, RefusesWrongSizes) {
  const MemoryTrace trace = trace_at(3);
  EXPECT_THROW(scaled({trace, 3, 1}, {trace, 3, 1}, 5), std::invalid_argument);
  EXPECT_THROW(largest_scaled({trace, 3, 1}, {trace, 4, 1}, {}, 5, 4), std::invalid_argument);
}

}  // namespace
}  // namespace brim
