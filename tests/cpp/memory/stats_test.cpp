#include <ATen/DeviceAccelerator.h>
#include <brim/memory/budget.h>
#include <brim/memory/cpu.h>
#include <brim/memory/host_memory.h>
#include <brim/memory/peak_meter.h>
#include <brim/memory/stats.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <string>

#include "tensors.h"

namespace brim {
namespace {

using tests::kMiB;
using tests::tensor_of;

bool has_accelerator() {
  return at::accelerator::getAccelerator(false).has_value() && at::accelerator::deviceCount() > 0;
}

TEST(MemoryStats, AllocatedFollowsTheTensors) {
  install_cpu_allocator();
  const std::int64_t before = memory_stats(at::kCPU).allocated;
  at::Tensor tensor = tensor_of(12345);
  EXPECT_EQ(memory_stats(at::kCPU).allocated, before + 12345);
  tensor.reset();
  EXPECT_EQ(memory_stats(at::kCPU).allocated, before);
}

TEST(MemoryStats, PeakIsTheMostSinceItWasReset) {
  install_cpu_allocator();
  reset_peak(at::kCPU);
  const std::int64_t start = memory_stats(at::kCPU).allocated;
  EXPECT_EQ(memory_stats(at::kCPU).peak, start);
  tensor_of(3000);
  tensor_of(1000);
  EXPECT_EQ(memory_stats(at::kCPU).peak, start + 3000);
  reset_peak(at::kCPU);
  EXPECT_EQ(memory_stats(at::kCPU).peak, start);
}

TEST(MemoryStats, MetersDoNotDisturbThePeak) {
  install_cpu_allocator();
  reset_peak(at::kCPU);
  const std::int64_t start = memory_stats(at::kCPU).allocated;
  tensor_of(5000);
  {
    const PeakMeter meter(at::kCPU);
  }
  tensor_of(100);
  {
    const PeakMeter meter(at::kCPU);
    tensor_of(200);
  }
  EXPECT_EQ(memory_stats(at::kCPU).peak, start + 5000);
}

TEST(MemoryStats, ResettingThePeakLeavesOpenMetersTheirs) {
  const PeakMeter meter(at::kCPU);
  tensor_of(5000);
  reset_peak(at::kCPU);
  tensor_of(100);
  EXPECT_EQ(meter.peak(), 5000);
}

TEST(MemoryStats, CpuLimitIsTheHostsAndReservedIsTheResidentSet) {
  const MemoryStats stats = memory_stats(at::kCPU);
  EXPECT_EQ(stats.limit, read_host_memory().limit());
  EXPECT_GT(stats.reserved, kMiB);
  EXPECT_LE(stats.reserved, stats.limit);
  EXPECT_GT(stats.free, 0);
  EXPECT_LE(stats.free, stats.limit);
}

TEST(MemoryStats, ABudgetLowersLimitAndFree) {
  install_cpu_allocator();
  const std::int64_t held = memory_stats(at::kCPU).allocated;
  const Budget budget(held + 10 * kMiB, at::kCPU);
  const at::Tensor tensor = tensor_of(3 * kMiB);
  const MemoryStats stats = memory_stats(at::kCPU);
  EXPECT_EQ(stats.limit, held + 10 * kMiB);
  EXPECT_EQ(stats.free, 7 * kMiB);
}

TEST(MemoryStats, NothingIsFreeBelowWhatIsInUse) {
  install_cpu_allocator();
  const at::Tensor tensor = tensor_of(3 * kMiB);
  const Budget budget(kMiB, at::kCPU);
  EXPECT_EQ(memory_stats(at::kCPU).free, 0);
}

TEST(MemoryStats, CacheFiguresAreZeroOnTheCpu) {
  const MemoryStats stats = memory_stats(at::kCPU);
  EXPECT_EQ(stats.inactive_split, 0);
  EXPECT_EQ(stats.alloc_retries, 0);
  EXPECT_EQ(stats.ooms, 0);
}

TEST(MemoryStats, AnIndexOnTheCpuMeansTheSameDevice) {
  install_cpu_allocator();
  const at::Tensor tensor = tensor_of(100);
  EXPECT_EQ(memory_stats(c10::Device(at::kCPU, 0)).allocated, memory_stats(at::kCPU).allocated);
}

TEST(MemoryStats, ADeviceWithoutMemoryIsRefused) {
  EXPECT_CONTAINS(tests::message_of<c10::ValueError>([] { memory_stats(c10::Device("meta")); }),
                  "meta");
  EXPECT_CONTAINS(tests::message_of<c10::ValueError>([] { reset_peak(c10::Device("meta")); }),
                  "meta");
}

TEST(MemoryStats, ADeviceThatDoesNotExistIsRefused) {
  if (has_accelerator()) {
    const c10::Device none(*at::accelerator::getAccelerator(false), 99);
    EXPECT_CONTAINS(tests::message_of<c10::ValueError>([&] { memory_stats(none); }), none.str());
  } else {
    EXPECT_CONTAINS(tests::message_of<c10::ValueError>([] { memory_stats(c10::Device("cuda:0")); }),
                    "cuda:0");
    EXPECT_CONTAINS(tests::message_of<c10::ValueError>([] { memory_stats(c10::Device("xpu")); }),
                    "xpu");
  }
}

TEST(MemoryStats, DefaultDeviceIsTheCpuWhereThereIsNoAccelerator) {
  EXPECT_EQ(default_device().is_cpu(), !has_accelerator());
}

TEST(MemoryStats, TextHasOneFigureALine) {
  MemoryStats stats;
  stats.allocated = 1;
  stats.peak = 2048;
  stats.reserved = 3 * kMiB;
  stats.limit = 4096 * kMiB;
  stats.free = 0;
  EXPECT_EQ(
      to_string(stats),
      "allocated 1 B\npeak      2.00 KiB\nreserved  3.00 MiB\nlimit     4.00 GiB\nfree      0 B");
}

}  // namespace
}  // namespace brim
