#include <brim/memory/cpu.h>
#include <brim/memory/release.h>
#include <brim/memory/stats.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "tensors.h"

namespace brim {
namespace {

using tests::kMiB;

TEST(ReleaseCached, GivesTheFreeListsOfTheCLibraryBack) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer has its own free lists";
#else
  // Small blocks below one that stays: the C library cannot return them by itself.
  std::vector<void*> blocks;
  for (int i = 0; i < 100'000; ++i) {
    blocks.push_back(std::malloc(1024));
    std::memset(blocks.back(), 1, 1024);
  }
  for (std::size_t i = 0; i + 1 < blocks.size(); ++i) {
    std::free(blocks[i]);
  }
  EXPECT_GT(release_cached(at::kCPU), 50 * kMiB);
  EXPECT_LT(release_cached(at::kCPU), 10 * kMiB) << "the second time there is little left";
  std::free(blocks.back());
#endif
}

TEST(ReleaseCached, LeavesTensorsAlone) {
  install_cpu_allocator();
  const at::Tensor tensor = tests::tensor_of(kMiB).fill_(3);
  const std::int64_t held = memory_stats(at::kCPU).allocated;
  EXPECT_GE(release_cached(at::kCPU), 0);
  EXPECT_EQ(memory_stats(at::kCPU).allocated, held);
  EXPECT_TRUE(tensor.eq(3).all().item<bool>());
}

TEST(ReleaseCached, RefusesADeviceWithoutMemory) {
  EXPECT_CONTAINS(tests::message_of<c10::ValueError>([] { release_cached(c10::Device("meta")); }),
                  "meta");
}

TEST(Fragmentation, TheCpuHasNoCache) {
  const at::Tensor tensor = tests::tensor_of(kMiB);
  const Fragmentation now = fragmentation(at::kCPU);
  EXPECT_EQ(now.cached, 0);
  EXPECT_EQ(now.stuck, 0);
  EXPECT_EQ(now.share, 0.0);
  EXPECT_GT(now.usable, 0);
  EXPECT_LE(now.usable, memory_stats(at::kCPU).limit);
}

TEST(Fragmentation, ExplainsAFailureThatNeededLessThanWasFree) {
  Fragmentation now;
  now.usable = 1000;
  EXPECT_TRUE(now.explains_failure_of(1));
  EXPECT_TRUE(now.explains_failure_of(1000));
  EXPECT_FALSE(now.explains_failure_of(1001));
  EXPECT_FALSE(now.explains_failure_of(0)) << "the size is not known";
  EXPECT_FALSE(now.explains_failure_of(-5));
}

TEST(Fragmentation, RefusesADeviceWithoutMemory) {
  EXPECT_CONTAINS(tests::message_of<c10::ValueError>([] { fragmentation(c10::Device("meta")); }),
                  "meta");
}

}  // namespace
}  // namespace brim
