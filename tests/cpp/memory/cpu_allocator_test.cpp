#include <ATen/ops/clone.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/resize.h>
#include <ATen/ops/zeros.h>
#include <brim/memory/cpu.h>
#include <brim/memory/peak_meter.h>
#include <brim/memory/stats.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <vector>

#include "tensors.h"

#if defined(__SANITIZE_ADDRESS__)
// A request that no machine can serve must fail here as it does without the sanitizer.
extern "C" const char* __asan_default_options();
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }
#endif

namespace brim {
namespace {

using tests::held;
using tests::in_threads;
using tests::tensor_of;

class CpuAllocator : public ::testing::Test {
 protected:
  CpuAllocator() { install_cpu_allocator(); }
};

TEST_F(CpuAllocator, CountsExactlyTheBytesThatTensorsAskFor) {
  const std::int64_t before = held();
  std::vector<at::Tensor> tensors;
  std::int64_t asked = 0;
  for (const std::int64_t bytes : {1, 2, 63, 64, 65, 1000, 4096, 123457, 1 << 20}) {
    tensors.push_back(tensor_of(bytes));
    asked += bytes;
    EXPECT_EQ(held() - before, asked);
  }
  tensors.push_back(at::zeros({3, 5}, at::kDouble));
  tensors.push_back(at::ones({7}, at::kHalf));
  EXPECT_EQ(held() - before, asked + 3 * 5 * 8 + 7 * 2);
  tensors.clear();
  EXPECT_EQ(held(), before);
}

TEST_F(CpuAllocator, ViewsAddNothingAndClonesAddTheirOwn) {
  const std::int64_t before = held();
  const at::Tensor base = tensor_of(1000);
  const at::Tensor view = base.view({10, 100}).slice(0, 2, 5);
  EXPECT_EQ(held() - before, 1000);
  const at::Tensor copy = view.clone();
  EXPECT_EQ(held() - before, 1300);
  EXPECT_TRUE(copy.equal(view));
}

TEST_F(CpuAllocator, ResizeCountsTheNewBytes) {
  const std::int64_t before = held();
  at::Tensor tensor = tensor_of(100);
  tensor.fill_(7);
  tensor.resize_({1000});
  EXPECT_EQ(held() - before, 1000);
  EXPECT_TRUE(tensor.slice(0, 0, 100).eq(7).all().item<bool>()) << "resizing keeps what was there";
  tensor.resize_({10});
  EXPECT_EQ(held() - before, 1000) << "torch keeps a larger storage";
  tensor.reset();
  EXPECT_EQ(held(), before);
}

TEST_F(CpuAllocator, EmptyTensorsCostNothing) {
  const std::int64_t before = held();
  const at::Tensor tensor = tensor_of(0);
  EXPECT_EQ(held(), before);
  EXPECT_EQ(tensor.numel(), 0);
  EXPECT_EQ(c10::GetCPUAllocator()->allocate(0).get(), nullptr);
}

TEST_F(CpuAllocator, DataIsAlignedTo64Bytes) {
  for (const std::int64_t bytes : {1, 7, 64, 100, 4096, 1 << 20, 3 << 20}) {
    const at::Tensor tensor = tensor_of(bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor.data_ptr()) % 64, 0U) << bytes;
  }
}

TEST_F(CpuAllocator, EveryByteCanBeWritten) {
  for (const std::int64_t bytes : {1, 64, 65, 100000}) {
    at::Tensor tensor = tensor_of(bytes);
    std::memset(tensor.data_ptr(), 0xAB,
                static_cast<std::size_t>(bytes));  // the sanitizer watches the ends
    EXPECT_TRUE(tensor.eq(0xAB).all().item<bool>());
  }
}

TEST_F(CpuAllocator, RawAllocateAndDeallocateAreCounted) {
  c10::Allocator* allocator = c10::GetCPUAllocator();
  const std::int64_t before = held();
  void* data = allocator->raw_allocate(777);
  ASSERT_NE(data, nullptr);
  EXPECT_EQ(held() - before, 777);
  std::memset(data, 1, 777);
  allocator->raw_deallocate(data);
  EXPECT_EQ(held(), before);
}

TEST_F(CpuAllocator, CloneOfADataPtrCopiesAndIsCounted) {
  c10::Allocator* allocator = c10::GetCPUAllocator();
  const std::int64_t before = held();
  const c10::DataPtr original = allocator->allocate(16);
  std::memcpy(original.get(), "fifteen letters", 16);
  const c10::DataPtr copy = allocator->clone(original.get(), 16);
  EXPECT_STREQ(static_cast<const char*>(copy.get()), "fifteen letters");
  EXPECT_EQ(held() - before, 32);
}

TEST_F(CpuAllocator, ARequestThatTheSystemCannotServeIsOutOfMemoryAndIsNotCounted) {
  const std::int64_t before = held();
  const std::string message =
      tests::message_of<c10::OutOfMemoryError>([] { tensor_of(std::int64_t{1} << 60); });
  EXPECT_CONTAINS(message,
                  "CPU out of memory. Tried to allocate 1.00 EiB (1152921504606846976 bytes)");
  EXPECT_CONTAINS(message, "the system has no more");
  EXPECT_THROW(c10::GetCPUAllocator()->allocate(SIZE_MAX), c10::OutOfMemoryError);
  EXPECT_THROW(c10::GetCPUAllocator()->allocate(SIZE_MAX / 2), c10::OutOfMemoryError);
  EXPECT_EQ(held(), before);
}

TEST_F(CpuAllocator, EightThreadsAllocatingAndFreeingAtRandomEndAtZero) {
  const PeakMeter meter(at::kCPU);
  in_threads(8, [](int number) {
    std::mt19937 random(static_cast<unsigned>(number));
    std::vector<at::Tensor> mine;
    for (int step = 0; step < 3000; ++step) {
      if (mine.empty() || random() % 2 == 0) {
        mine.push_back(tensor_of(static_cast<std::int64_t>(random() % 5000)));
      } else {
        std::swap(mine[random() % mine.size()], mine.back());
        mine.pop_back();
      }
    }
  });
  EXPECT_EQ(meter.left(), 0);
  EXPECT_GT(meter.peak(), 0);
}

TEST_F(CpuAllocator, FreeingOnAnotherThreadThanAllocatedIsCounted) {
  const PeakMeter meter(at::kCPU);
  std::mutex mutex;
  std::vector<at::Tensor> pool;
  in_threads(8, [&](int number) {
    std::mt19937 random(static_cast<unsigned>(100 + number));
    for (int step = 0; step < 2000; ++step) {
      at::Tensor made = tensor_of(static_cast<std::int64_t>(1 + random() % 3000));
      at::Tensor taken;  // by whichever thread made it, freed here outside of the lock
      const std::lock_guard lock(mutex);
      pool.push_back(std::move(made));
      if (random() % 2 == 0) {
        std::swap(pool[random() % pool.size()], pool.back());
        taken = std::move(pool.back());
        pool.pop_back();
      }
    }
  });
  std::int64_t remaining = 0;
  for (const at::Tensor& tensor : pool) {
    remaining += tensor.numel();
  }
  EXPECT_GT(remaining, 0);
  EXPECT_EQ(meter.left(), remaining);
  pool.clear();
  EXPECT_EQ(meter.left(), 0);
}

// What depends on when the allocator is installed runs in a fresh process.

#define EXPECT_IN_FRESH_PROCESS(...)              \
  GTEST_FLAG_SET(death_test_style, "threadsafe"); \
  EXPECT_EXIT(                                    \
      {                                           \
        const bool right = [] { __VA_ARGS__ }();  \
        std::_Exit(right ? 0 : 1);                \
      },                                          \
      ::testing::ExitedWithCode(0), "")

TEST(CpuAllocatorDeathTest, IsNotInstalledByLinkingNorByAskingForStatistics) {
  EXPECT_IN_FRESH_PROCESS(c10::Allocator* stock = c10::GetCPUAllocator();
                          const at::Tensor tensor = tensor_of(1000);
                          const MemoryStats stats = memory_stats(at::kCPU); reset_peak(at::kCPU);
                          return !cpu_allocator_installed() && c10::GetCPUAllocator() == stock &&
                                 stats.allocated == 0 && stats.peak == 0;);
}

TEST(CpuAllocatorDeathTest, ASecondInstallationChangesNothing) {
  EXPECT_IN_FRESH_PROCESS(install_cpu_allocator(); c10::Allocator* first = c10::GetCPUAllocator();
                          const at::Tensor tensor = tensor_of(1000); install_cpu_allocator();
                          return cpu_allocator_installed() && c10::GetCPUAllocator() == first &&
                                 held() == 1000;);
}

TEST(CpuAllocatorDeathTest, TensorsFromBeforeTheInstallationAreFreedAndNeverCounted) {
  EXPECT_IN_FRESH_PROCESS(
      at::Tensor freed = tensor_of(5000); at::Tensor resized = tensor_of(10);
      install_cpu_allocator(); if (held() != 0) { return false; } freed.reset(); if (held() != 0) {
        return false;
      } resized.resize_({100000});  // its storage keeps the allocator it came from
      if (held() != 0) { return false; } resized.reset(); const at::Tensor counted = tensor_of(123);
      return held() == 123;);
}

TEST(CpuAllocatorDeathTest, AMeterInstallsItByItself) {
  EXPECT_IN_FRESH_PROCESS(const PeakMeter meter(at::kCPU); const at::Tensor tensor = tensor_of(123);
                          return cpu_allocator_installed() && meter.peak() == 123;);
}

}  // namespace
}  // namespace brim
