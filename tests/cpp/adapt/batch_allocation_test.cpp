// An executable of its own: it replaces operator new to count what a call that fits takes from the
// heap, which has to be nothing.

#include <ATen/Context.h>
#include <ATen/ops/rand.h>
#include <brim/adapt/adapt.h>
#include <brim/adapt/size_memory.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<std::int64_t> allocations{0};

}  // namespace

// Not inlined: seen beside a call of `new`, `free` would look like the wrong way to give memory
// back.
[[gnu::noinline]] void* operator new(std::size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* block = std::malloc(size == 0 ? 1 : size)) {
    return block;
  }
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* block) noexcept { std::free(block); }
[[gnu::noinline]] void operator delete(void* block, std::size_t) noexcept { std::free(block); }

namespace brim {
namespace {

template <class Work>
std::int64_t allocations_of(const Work& work) {
  work();  // what is made once, at the first call, is not what is counted
  const std::int64_t before = allocations.load();
  for (int i = 0; i < 100; ++i) {
    work();
  }
  return allocations.load() - before;
}

TEST(BatchAllocation, TheCountersCount) {
  EXPECT_EQ(allocations_of([] { ::operator delete(::operator new(10)); }), 100);
}

TEST(BatchAllocation, ACallThatFitsAllocatesNothing) {
  std::int64_t sum = 0;
  const auto add = [&](std::int64_t size) { return sum += size; };
  EXPECT_EQ(allocations_of([&] { batch(512, add); }), 0);
  EXPECT_EQ(allocations_of([&] { maximize(512, add); }), 0);
  SizeMemory memory;
  const AdaptOptions options{.memory = &memory, .key = 3};
  EXPECT_EQ(allocations_of([&] { batch(512, add, options); }), 0) << "as long as nothing is known";
  const AdaptOptions careless{.device = c10::Device(at::kCPU), .restore_random_state = false};
  EXPECT_EQ(allocations_of([&] { batch(512, add, careless); }), 0);
  EXPECT_EQ(sum, 4 * 101 * 512);
}

TEST(BatchAllocation, NorWhereRandomNumbersAreDrawnInBetween) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  std::uint64_t seed = 1;
  const std::int64_t by_itself = allocations_of([&] { generator.set_current_seed(++seed); });
  const std::int64_t with_calls = allocations_of([&] {
    generator.set_current_seed(++seed);
    batch(512, [](std::int64_t size) { return size; });
  });
  EXPECT_EQ(with_calls, by_itself) << "the snapshot is reused";
}

}  // namespace
}  // namespace brim
