#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <brim/memory/budget.h>
#include <brim/memory/cpu.h>
#include <brim/memory/out_of_memory.h>
#include <brim/memory/peak_meter.h>
#include <brim/memory/stats.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tensors.h"

namespace brim {
namespace {

using tests::held;
using tests::in_threads;
using tests::kMiB;
using tests::tensor_of;

std::int64_t limit_now() { return memory_stats(at::kCPU).limit; }

class Budgets : public ::testing::Test {
 protected:
  Budgets() { install_cpu_allocator(); }

  std::int64_t unlimited_ = limit_now();
  std::int64_t base_ = held();
};

TEST_F(Budgets, SwitchOneDnnOnAgainIfItWasOn) {
  at::Context& torch = at::globalContext();
  const bool before = torch.userEnabledMkldnn();
  for (const bool enabled : {false, true}) {
    torch.setUserEnabledMkldnn(enabled);
    {
      const Budget budget("1GiB", at::kCPU);
      torch.setUserEnabledMkldnn(false);  // as torch does if oneDNN runs out of memory
    }
    EXPECT_EQ(torch.userEnabledMkldnn(), enabled);
  }
  torch.setUserEnabledMkldnn(before);
}

TEST_F(Budgets, AllowsUpToTheLastByteAndNoMore) {
  const Budget budget(base_ + 1000, at::kCPU);
  const at::Tensor most = tensor_of(999);
  EXPECT_THROW(tensor_of(2), c10::OutOfMemoryError);
  const at::Tensor last = tensor_of(1);
  EXPECT_THROW(tensor_of(1), c10::OutOfMemoryError);
  EXPECT_NO_THROW(tensor_of(0));
  EXPECT_EQ(held() - base_, 1000);
}

TEST_F(Budgets, OneThreadMayGoBeyondThem) {
  const Budget budget(base_ + 1000, at::kCPU);
  {
    BeyondBudget beyond;
    const at::Tensor more = tensor_of(2000);
    EXPECT_EQ(held(), base_ + 2000);
    in_threads(1, [](int) { EXPECT_THROW(tensor_of(1), c10::OutOfMemoryError); });
    beyond.close();
    EXPECT_THROW(tensor_of(1), c10::OutOfMemoryError);
  }
  EXPECT_NO_THROW(tensor_of(1000));
  EXPECT_THROW(tensor_of(1001), c10::OutOfMemoryError);
}

TEST_F(Budgets, FreedBytesCanBeUsedAgain) {
  const Budget budget(base_ + 1000, at::kCPU);
  for (int i = 0; i < 5; ++i) {
    EXPECT_NO_THROW(tensor_of(1000));
  }
}

TEST_F(Budgets, TheMessageTellsAskedInUseAndAllowed) {
  const at::Tensor mine = tensor_of(3000);
  const Budget budget(base_ + 5000, at::kCPU);
  const std::string message = tests::message_of<c10::OutOfMemoryError>([] { tensor_of(4096); });
  EXPECT_CONTAINS(message, "CPU out of memory. Tried to allocate 4.00 KiB (4096 bytes) with ");
  EXPECT_CONTAINS(message, "(" + std::to_string(base_ + 3000) + " bytes) in use");
  EXPECT_CONTAINS(message, "(" + std::to_string(base_ + 5000) + " bytes) allowed by the budget");
}

TEST_F(Budgets, ALimitBelowWhatIsInUseIsAllowedAndTheNextAllocationFails) {
  at::Tensor mine = tensor_of(10 * kMiB);
  const Budget budget(kMiB, at::kCPU);
  const std::string message = tests::message_of<c10::OutOfMemoryError>([] { tensor_of(1); });
  EXPECT_CONTAINS(message, "Tried to allocate 1 B (1 bytes)");
  EXPECT_CONTAINS(message, "(" + std::to_string(base_ + 10 * kMiB) + " bytes) in use");
  EXPECT_CONTAINS(message, "1.00 MiB (1048576 bytes) allowed by the budget, which is less than");
  mine.fill_(1);  // what is held stays usable
  mine.reset();
  if (base_ < kMiB) {
    EXPECT_NO_THROW(tensor_of(1));
  }
}

TEST_F(Budgets, AFailedAllocationCountsNothing) {
  const Budget budget(base_ + 100, at::kCPU);
  const PeakMeter meter(at::kCPU);
  EXPECT_THROW(tensor_of(101), c10::OutOfMemoryError);
  EXPECT_EQ(meter.peak(), 0);
  EXPECT_EQ(meter.left(), 0);
}

TEST_F(Budgets, ResizeIsUnderTheBudget) {
  at::Tensor tensor = tensor_of(100);
  const Budget budget(base_ + 1000, at::kCPU);
  EXPECT_THROW(tensor.resize_({1001}), c10::OutOfMemoryError);
  EXPECT_EQ(held() - base_, 100);
}

TEST_F(Budgets, EndsWithItsScope) {
  {
    const Budget budget(kMiB, at::kCPU);
    EXPECT_EQ(limit_now(), kMiB);
    EXPECT_THROW(tensor_of(2 * kMiB), c10::OutOfMemoryError);
  }
  EXPECT_EQ(limit_now(), unlimited_);
  EXPECT_NO_THROW(tensor_of(2 * kMiB));
}

TEST_F(Budgets, EndsWhenAnExceptionPasses) {
  try {
    const Budget outer(3 * kMiB, at::kCPU);
    try {
      const Budget inner(kMiB, at::kCPU);
      tensor_of(2 * kMiB);
      FAIL() << "does not fit";
    } catch (const c10::OutOfMemoryError&) {
      EXPECT_EQ(limit_now(), 3 * kMiB);
    }
    throw std::runtime_error("work failed");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(limit_now(), unlimited_);
}

TEST_F(Budgets, CloseEndsItOnce) {
  Budget outer(5 * kMiB, at::kCPU);
  Budget first(kMiB, at::kCPU);
  const Budget second(kMiB, at::kCPU);
  first.close();
  first.close();  // must not take the equal limit of the other one away
  EXPECT_EQ(limit_now(), kMiB);
  EXPECT_EQ(first.limit(), kMiB);
}

TEST_F(Budgets, TheTightestOfNestedBudgetsIsInForce) {
  const Budget outer(10 * kMiB, at::kCPU);
  {
    const Budget inner(5 * kMiB, at::kCPU);
    EXPECT_EQ(limit_now(), 5 * kMiB);
    const Budget looser(8 * kMiB, at::kCPU);
    EXPECT_EQ(limit_now(), 5 * kMiB) << "an inner budget cannot widen the outer one";
    EXPECT_EQ(looser.limit(), 8 * kMiB);
  }
  EXPECT_EQ(limit_now(), 10 * kMiB);
}

TEST_F(Budgets, MayEndInAnyOrder) {
  std::mt19937 random(5);
  std::vector<std::unique_ptr<Budget>> open;
  std::multiset<std::int64_t> limits;  // the reference
  for (int step = 0; step < 500; ++step) {
    if (open.empty() || random() % 2 == 0) {
      const std::int64_t bytes =
          kMiB + static_cast<std::int64_t>(random() % 8);  // equal ones happen
      open.push_back(std::make_unique<Budget>(bytes, at::kCPU));
      limits.insert(bytes);
    } else {
      std::swap(open[random() % open.size()], open.back());
      limits.erase(limits.find(open.back()->limit()));
      open.pop_back();
    }
    ASSERT_EQ(limit_now(), limits.empty() ? unlimited_ : *limits.begin());
  }
}

TEST_F(Budgets, PercentIsOfTheLimitInForceWhenOpened) {
  const Budget half("50%", at::kCPU);
  EXPECT_EQ(half.limit(), unlimited_ / 2);
  const Budget outer(1000 * kMiB, at::kCPU);
  const Budget tenth("10%", at::kCPU);
  EXPECT_EQ(tenth.limit(), 100 * kMiB);
  const Budget half_of_that("50%", at::kCPU);
  EXPECT_EQ(half_of_that.limit(), 50 * kMiB);
  EXPECT_EQ(limit_now(), 50 * kMiB);
}

TEST_F(Budgets, TakesTextAndByteLimits) {
  EXPECT_EQ(Budget("512MiB", at::kCPU).limit(), 512 * kMiB);
  EXPECT_EQ(Budget("8GB", at::kCPU).limit(), 8'000'000'000);
  EXPECT_EQ(Budget(ByteLimit::of_bytes(77), at::kCPU).limit(), 77);
  EXPECT_TRUE(Budget("1GiB", c10::Device(at::kCPU, 0)).device().is_cpu());
}

TEST_F(Budgets, MoreThanTheMachineHasLimitsNothing) {
  const Budget budget("1EB", at::kCPU);
  EXPECT_EQ(limit_now(), unlimited_);
}

TEST_F(Budgets, WrongArgumentsAreRefusedAndLeaveNoLimit) {
  for (const std::int64_t bytes : {std::int64_t{0}, std::int64_t{-1}}) {
    EXPECT_CONTAINS(tests::message_of<c10::ValueError>([&] { Budget(bytes, at::kCPU); }),
                    "limit must be");
  }
  EXPECT_CONTAINS(tests::message_of<c10::ValueError>([] { Budget("lots", at::kCPU); }), "\"lots\"");
  EXPECT_CONTAINS(tests::message_of<c10::ValueError>([] { Budget("1GiB", c10::Device("meta")); }),
                  "meta");
  if (!at::accelerator::getAccelerator(false) || at::accelerator::deviceCount() == 0) {
    EXPECT_CONTAINS(
        tests::message_of<c10::ValueError>([] { Budget("1GiB", c10::Device("cuda:0")); }),
        "cuda:0");
  }
  EXPECT_EQ(limit_now(), unlimited_);
}

TEST_F(Budgets, AllocationsOfEveryThreadCount) {
  const Budget budget(base_ + 8 * kMiB, at::kCPU);
  at::Tensor theirs;
  std::thread([&] { theirs = tensor_of(7 * kMiB); }).join();
  EXPECT_THROW(tensor_of(2 * kMiB), c10::OutOfMemoryError);
  EXPECT_NO_THROW(tensor_of(kMiB));
}

TEST_F(Budgets, EightThreadsNeverOvershoot) {
  const std::int64_t room = 200'000;
  const Budget budget(base_ + room, at::kCPU);
  const PeakMeter meter(at::kCPU);
  std::atomic<int> refused{0};
  in_threads(8, [&](int number) {
    std::mt19937 random(static_cast<unsigned>(number));
    std::vector<at::Tensor> mine;
    for (int step = 0; step < 3000; ++step) {
      try {
        mine.push_back(tensor_of(static_cast<std::int64_t>(1 + random() % 9000)));
      } catch (const c10::OutOfMemoryError&) {
        ++refused;
        mine.clear();
      }
    }
  });
  EXPECT_GT(refused.load(), 0) << "the budget was never reached, so nothing was tested";
  EXPECT_LE(meter.peak(), room);
  EXPECT_GT(meter.peak(), room / 2);
  EXPECT_EQ(meter.left(), 0);
}

TEST_F(Budgets, TwoThatFitOneByOneNeverFitTogether) {
  // Straight to the allocator and from a common start: the moment between looking at the limit and
  // taking the bytes is a nanosecond long.
  const Budget budget(base_ + 1000, at::kCPU);
  std::barrier end(2);
  std::atomic<int> arrived{0};
  std::atomic<int> served{0};
  std::atomic<int> rounds_with_both{0};
  in_threads(2, [&](int) {
    for (int round = 1; round <= 20'000; ++round) {
      ++arrived;
      for (int spin = 0; arrived.load() < 2 * round; ++spin) {
        if (spin > 100'000) {
          std::this_thread::yield();  // the other one waits for this core
        }
      }
      c10::DataPtr mine;
      try {
        mine = c10::GetCPUAllocator()->allocate(600);
        ++served;
      } catch (const c10::OutOfMemoryError&) {
      }
      end.arrive_and_wait();
      if (served.exchange(0) > 1) {
        ++rounds_with_both;
      }
      mine.clear();
      end.arrive_and_wait();
    }
  });
  EXPECT_EQ(rounds_with_both.load(), 0);
}

TEST_F(Budgets, AFailingAllocationNeverMakesASmallerOneFail) {
  const Budget budget(base_ + kMiB, at::kCPU);
  std::atomic<bool> done{false};
  std::atomic<int> wrongly_served{0};
  std::atomic<int> refused{0};
  std::vector<std::thread> greedy;
  greedy.reserve(7);
  for (int i = 0; i < 7; ++i) {
    greedy.emplace_back([&] {
      while (!done.load()) {
        try {
          tensor_of(2 * kMiB);
          ++wrongly_served;
        } catch (const c10::OutOfMemoryError&) {
          ++refused;
        }
      }
    });
  }
  int failures = 0;
  for (int i = 0; i < 20'000 || refused.load() < 1000; ++i) {
    try {
      tensor_of(kMiB);  // all there is, and nobody else ever holds any of it
    } catch (const c10::OutOfMemoryError&) {
      ++failures;
    }
  }
  done.store(true);
  for (std::thread& thread : greedy) {
    thread.join();
  }
  EXPECT_EQ(failures, 0);
  EXPECT_EQ(wrongly_served.load(), 0);
}

TEST_F(Budgets, ThreadsMayOpenAndEndBudgetsAtOnce) {
  in_threads(8, [](int number) {
    for (int i = 0; i < 500; ++i) {
      const Budget budget((100 + number) * kMiB, at::kCPU);
      EXPECT_NO_THROW(tensor_of(100));
    }
  });
  EXPECT_EQ(limit_now(), unlimited_);
}

TEST_F(Budgets, ItsErrorIsClassifiedWithTheExactRequest) {
  const Budget budget(base_ + 1000, at::kCPU);
  try {
    tensor_of(1234567);
    FAIL() << "does not fit";
  } catch (const std::exception& error) {
    const OomCause cause = classify(error);
    EXPECT_EQ(cause.kind, OomKind::host_memory);
    EXPECT_EQ(cause.device, c10::Device(at::kCPU));
    EXPECT_EQ(cause.requested, 1234567);
  }
}

}  // namespace
}  // namespace brim
