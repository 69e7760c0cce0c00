#include <ATen/DeviceAccelerator.h>
#include <brim/memory/cpu.h>
#include <brim/memory/peak_meter.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "tensors.h"

namespace brim {
namespace {

using tests::in_threads;
using tests::kMiB;
using tests::tensor_of;

TEST(PeakMeter, PeakOfAKnownPatternIsExactToTheByte) {
  const PeakMeter meter(at::kCPU);
  EXPECT_EQ(meter.peak(), 0);
  at::Tensor a = tensor_of(1001);
  at::Tensor b = tensor_of(2003);
  EXPECT_EQ(meter.peak(), 3004);
  a.reset();
  at::Tensor c = tensor_of(500);
  EXPECT_EQ(meter.peak(), 3004) << "2503 at once is less";
  at::Tensor d = tensor_of(502);
  EXPECT_EQ(meter.peak(), 3005);
  b.reset();
  c.reset();
  d.reset();
  EXPECT_EQ(meter.peak(), 3005);
  EXPECT_EQ(meter.left(), 0);
}

TEST(PeakMeter, SumOfASetOfTensorsIsTheBytesTheyAskedFor) {
  const PeakMeter meter(at::kCPU);
  std::vector<at::Tensor> tensors;
  std::int64_t asked = 0;
  std::mt19937 random(3);
  for (int i = 0; i < 500; ++i) {
    const auto bytes = static_cast<std::int64_t>(random() % 100'000);
    tensors.push_back(tensor_of(bytes));
    asked += bytes;
  }
  EXPECT_EQ(meter.peak(), asked);
  EXPECT_EQ(meter.left(), asked);
}

TEST(PeakMeter, CountsFromWhatWasHeldAtItsOpening) {
  install_cpu_allocator();
  at::Tensor older = tensor_of(10'000);
  const PeakMeter meter(at::kCPU);
  EXPECT_GE(meter.start(), 10'000);
  const at::Tensor mine = tensor_of(300);
  EXPECT_EQ(meter.peak(), 300);
  EXPECT_EQ(meter.left(), 300);
  older.reset();
  EXPECT_EQ(meter.left(), 300 - 10'000) << "the work freed an older tensor";
  EXPECT_EQ(meter.peak(), 300);
  EXPECT_EQ(meter.freed(), 10'000 - 300);
  older = tensor_of(10'000);
  EXPECT_EQ(meter.left(), 300);
  EXPECT_EQ(meter.freed(), 10'000 - 300) << "even where a new one took its place";
}

TEST(PeakMeter, InnerMeterKeepsOuterPeak) {
  const PeakMeter outer(at::kCPU);
  tensor_of(7000);
  {
    const PeakMeter inner(at::kCPU);
    EXPECT_EQ(inner.peak(), 0) << "what was before is not the inner meter's";
    tensor_of(2000);
    EXPECT_EQ(inner.peak(), 2000);
  }
  EXPECT_EQ(outer.peak(), 7000);
}

TEST(PeakMeter, OuterMeterSeesThePeakInsideTheInner) {
  const PeakMeter outer(at::kCPU);
  const at::Tensor kept = tensor_of(100);
  {
    const PeakMeter inner(at::kCPU);
    tensor_of(9000);
    EXPECT_EQ(inner.peak(), 9000);
  }
  tensor_of(50);
  EXPECT_EQ(outer.peak(), 9100);
}

TEST(PeakMeter, MetersInARowEachSeeTheirOwn) {
  const PeakMeter outer(at::kCPU);
  for (const std::int64_t bytes : {3000, 5000, 100}) {
    const PeakMeter meter(at::kCPU);
    tensor_of(bytes);
    EXPECT_EQ(meter.peak(), bytes);
  }
  EXPECT_EQ(outer.peak(), 5000);
}

TEST(PeakMeter, OverlappingMetersMayCloseInAnyOrder) {
  PeakMeter first(at::kCPU);
  tensor_of(1000);
  PeakMeter second(at::kCPU);
  tensor_of(2000);
  first.close();
  PeakMeter third(at::kCPU);
  tensor_of(3000);
  second.close();
  tensor_of(4000);
  EXPECT_EQ(first.peak(), 2000);
  EXPECT_EQ(second.peak(), 3000);
  EXPECT_EQ(third.peak(), 4000);
}

TEST(PeakMeter, FiguresStayAfterClosing) {
  PeakMeter meter(at::kCPU);
  at::Tensor kept = tensor_of(40);
  meter.close();
  meter.close();
  const at::Tensor later = tensor_of(5000);
  {
    const PeakMeter another(at::kCPU);
  }  // hands the peak so far to every meter that is open
  kept.reset();
  EXPECT_EQ(meter.peak(), 40);
  EXPECT_EQ(meter.left(), 40);
}

TEST(PeakMeter, ClosesWhenAnExceptionPasses) {
  const PeakMeter outer(at::kCPU);
  try {
    const PeakMeter inner(at::kCPU);
    const at::Tensor lost = tensor_of(1234);
    throw std::runtime_error("work failed");
  } catch (const std::runtime_error&) {
  }
  tensor_of(10);  // a meter that stayed in the ledger would be written to after its end
  {
    const PeakMeter another(at::kCPU);
  }
  EXPECT_EQ(outer.peak(), 1234);
  EXPECT_EQ(outer.left(), 0);
}

TEST(PeakMeter, RandomPatternsAgreeWithABookkeeper) {
  install_cpu_allocator();
  // The reference: the bytes held after each step, and for each meter the steps between which it
  // was open.
  std::mt19937 random(2024);
  for (int round = 0; round < 30; ++round) {
    struct Open {
      std::unique_ptr<PeakMeter> meter;
      std::int64_t start;
      std::int64_t highest;
      std::int64_t lowest;
    };
    std::vector<Open> open;
    std::vector<at::Tensor> tensors;
    std::int64_t now = 0;
    for (int step = 0; step < 300; ++step) {
      switch (random() % 6) {
        case 0:
          open.push_back({std::make_unique<PeakMeter>(at::kCPU), now, now, now});
          break;
        case 1:
          if (!open.empty()) {
            std::swap(open[random() % open.size()], open.back());
            open.back().meter->close();
            ASSERT_EQ(open.back().meter->peak(), open.back().highest - open.back().start);
            ASSERT_EQ(open.back().meter->left(), now - open.back().start);
            open.pop_back();
          }
          break;
        case 2:
        case 3:
          if (!tensors.empty()) {
            std::swap(tensors[random() % tensors.size()], tensors.back());
            now -= tensors.back().numel();
            tensors.pop_back();
            for (Open& meter : open) {
              meter.lowest = std::min(meter.lowest, now);
            }
          }
          break;
        default:
          tensors.push_back(tensor_of(static_cast<std::int64_t>(random() % 10'000)));
          now += tensors.back().numel();
          for (Open& meter : open) {
            meter.highest = std::max(meter.highest, now);
          }
      }
      for (const Open& meter : open) {
        ASSERT_EQ(meter.meter->peak(), meter.highest - meter.start);
        ASSERT_EQ(meter.meter->freed(), meter.start - meter.lowest);
      }
    }
  }
}

TEST(PeakMeter, SeesWhatOtherThreadsHold) {
  const PeakMeter meter(at::kCPU);
  std::barrier all_hold(8);
  in_threads(8, [&](int number) {
    const at::Tensor mine = tensor_of(kMiB + number);
    all_hold.arrive_and_wait();  // all at once, once
  });
  EXPECT_EQ(meter.peak(), 8 * kMiB + 28);
  EXPECT_EQ(meter.left(), 0);
}

TEST(PeakMeter, MetersOfOtherThreadsDoNotLoseAPeak) {
  // Threads open and close meters, each of which resets the shared peak, while this one follows a
  // known pattern.
  std::atomic<bool> done{false};
  std::vector<std::thread> others;
  others.reserve(3);
  for (int i = 0; i < 3; ++i) {
    others.emplace_back([&] {
      while (!done.load()) {
        const PeakMeter meter(at::kCPU);
        EXPECT_GE(meter.peak(), 0);
      }
    });
  }
  for (int round = 0; round < 3000; ++round) {
    const PeakMeter meter(at::kCPU);
    const at::Tensor kept = tensor_of(100);
    tensor_of(5000);
    tensor_of(300);
    ASSERT_EQ(meter.peak(), 5100) << "in round " << round;
  }
  done.store(true);
  for (std::thread& other : others) {
    other.join();
  }
}

TEST(PeakMeter, MayBeReadWhileOthersAllocate) {
  const PeakMeter meter(at::kCPU);
  std::atomic<bool> done{false};
  std::thread reader([&] {
    while (!done.load()) {
      EXPECT_GE(meter.peak(), 0);
      EXPECT_LE(meter.peak(), 100 + 101 + 102 + 103);
    }
  });
  in_threads(4, [](int number) {
    for (int step = 0; step < 5000; ++step) {
      tensor_of(100 + number);
    }
  });
  done.store(true);
  reader.join();
  EXPECT_GE(meter.peak(), 103);
  EXPECT_EQ(meter.left(), 0);
}

TEST(PeakMeter, AMeterMayBeClosedOnAnotherThread) {
  auto meter = std::make_unique<PeakMeter>(at::kCPU);
  tensor_of(800);
  std::thread([&] { meter->close(); }).join();
  EXPECT_EQ(meter->peak(), 800);
}

TEST(PeakMeter, TellsTheDevicesItWatches) {
  const PeakMeter meter(std::vector<c10::Device>{at::kCPU});
  ASSERT_EQ(meter.devices().size(), 1U);
  EXPECT_TRUE(meter.devices()[0].is_cpu());
  const at::Tensor tensor = tensor_of(60);
  EXPECT_EQ(meter.peak(at::kCPU), 60);
  EXPECT_EQ(meter.left(at::kCPU), 60);
  EXPECT_EQ(meter.peak(c10::Device(at::kCPU, 0)), 60);
  EXPECT_EQ(meter.start(at::kCPU), meter.start());
}

TEST(PeakMeter, WrongDevicesAreRefused) {
  using Devices = std::vector<c10::Device>;
  EXPECT_CONTAINS(tests::message_of<c10::ValueError>([] { PeakMeter{Devices{}}; }),
                  "devices is empty");
  EXPECT_CONTAINS(tests::message_of<c10::ValueError>(
                      [] { PeakMeter{Devices{at::kCPU, c10::Device(at::kCPU, 0)}}; }),
                  "devices names cpu twice");
  EXPECT_CONTAINS(tests::message_of<c10::ValueError>([] { PeakMeter{c10::Device("meta")}; }),
                  "meta");
  const PeakMeter meter(at::kCPU);
  EXPECT_CONTAINS(tests::message_of<c10::ValueError>([&] { meter.peak(c10::Device("meta")); }),
                  "meta");
}

TEST(PeakMeter, ARefusedDeviceLeavesNoOtherMeterBehind) {
  const PeakMeter outer(at::kCPU);
  for (int i = 0; i < 3; ++i) {
    EXPECT_THROW(PeakMeter(std::vector<c10::Device>{at::kCPU, c10::Device("meta")}),
                 c10::ValueError);
  }
  tensor_of(77);
  {
    const PeakMeter inner(at::kCPU);
  }  // would write to an entry that was left behind
  EXPECT_EQ(outer.peak(), 77);
}

TEST(PeakMeter, WatchesSeveralDevicesAtOnce) {
  const auto accelerator = at::accelerator::getAccelerator(false);
  if (!accelerator || at::accelerator::deviceCount() == 0) {
    GTEST_SKIP() << "there is one device only";
  }
  const c10::Device device(*accelerator, 0);
  const PeakMeter meter(std::vector<c10::Device>{at::kCPU, device});
  tensor_of(500);
  EXPECT_EQ(meter.peak(at::kCPU), 500);
  EXPECT_EQ(meter.peak(device), 0);
  EXPECT_CONTAINS(tests::message_of<c10::ValueError>([&] { meter.peak(); }), "2 devices");
}

}  // namespace
}  // namespace brim
