#include <ATen/ops/ones.h>
#include <brim/memory/budget.h>
#include <brim/memory/out_of_memory.h>
#include <brim/memory/peak_meter.h>
#include <brim/memory/stats.h>
#include <brim/testing/oom_injector.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <atomic>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "tensors.h"

namespace brim::testing {
namespace {

using tests::in_threads;
using tests::tensor_of;

/// 'x' for each of `count` allocations that fails, '.' for one that does not.
std::string attempts(int count) {
  std::string result;
  for (int i = 0; i < count; ++i) {
    try {
      tensor_of(10);
      result += '.';
    } catch (const c10::OutOfMemoryError&) {
      result += 'x';
    }
  }
  return result;
}

TEST(OomInjector, FailsTheAllocationThatWasChosen) {
  for (int at = 1; at <= 4; ++at) {
    const OomInjector injector(at);
    std::string expected = ".....";
    expected[static_cast<std::size_t>(at - 1)] = 'x';
    EXPECT_EQ(attempts(5), expected);
  }
}

TEST(OomInjector, FailsCountTimesInARow) {
  const OomInjector injector(3, 2);
  EXPECT_EQ(attempts(7), "..xx...");
  EXPECT_EQ(injector.allocations(), 7);
  EXPECT_EQ(injector.failures(), 2);
}

TEST(OomInjector, CanFailForEver) {
  const OomInjector injector(2, std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(attempts(6), ".xxxxx");
  const OomInjector never(std::numeric_limits<std::int64_t>::max(),
                          std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(never.failures(), 0);
}

TEST(OomInjector, EmptyTensorsAreNoAllocations) {
  const OomInjector injector(1);
  EXPECT_NO_THROW(tensor_of(0));
  EXPECT_EQ(injector.allocations(), 0);
  EXPECT_THROW(tensor_of(1), c10::OutOfMemoryError);
}

TEST(OomInjector, EndsWithItsScopeOrEarlier) {
  {
    const OomInjector injector(1, 100);
    EXPECT_EQ(attempts(2), "xx");
  }
  EXPECT_EQ(attempts(2), "..");
  OomInjector injector(2);
  EXPECT_EQ(attempts(1), ".");
  injector.close();
  injector.close();
  EXPECT_EQ(attempts(3), "...");
  EXPECT_EQ(injector.allocations(), 1) << "nothing is counted after closing";
  EXPECT_EQ(injector.failures(), 0);
}

TEST(OomInjector, SeveralCountEveryAllocationEach) {
  const OomInjector outer(4);
  EXPECT_EQ(attempts(1), ".");
  {
    const OomInjector inner(2);
    EXPECT_EQ(attempts(2), ".x");
    EXPECT_EQ(inner.allocations(), 2);
    EXPECT_EQ(outer.failures(), 0) << "the failure was the inner one's";
  }
  EXPECT_EQ(attempts(2), "x.") << "the outer one's fourth";
  EXPECT_EQ(outer.allocations(), 5);
  EXPECT_EQ(outer.failures(), 1);
}

TEST(OomInjector, MayEndInAnyOrder) {
  auto first = std::make_unique<OomInjector>(2);
  auto second = std::make_unique<OomInjector>(3);
  first.reset();
  EXPECT_EQ(attempts(4), "..x.");
}

TEST(OomInjector, TwoThatAgreeFailOneAllocation) {
  const OomInjector one(1);
  const OomInjector two(1);
  EXPECT_EQ(attempts(2), "x.");
  EXPECT_EQ(one.failures() + two.failures(), 2);
}

TEST(OomInjector, CountsTheAllocationsOfEveryThread) {
  const OomInjector injector(101, 50);
  std::atomic<int> failed{0};
  in_threads(8, [&](int) {
    for (int i = 0; i < 100; ++i) {
      try {
        tensor_of(10);
      } catch (const c10::OutOfMemoryError&) {
        ++failed;
      }
    }
  });
  EXPECT_EQ(injector.allocations(), 800);
  EXPECT_EQ(injector.failures(), 50);
  EXPECT_EQ(failed.load(), 50);
}

TEST(OomInjector, ThreadsMayOpenAndCloseThemWhileOthersAllocate) {
  std::atomic<bool> done{false};
  std::thread other([&] {
    while (!done.load()) {
      const OomInjector harmless(std::numeric_limits<std::int64_t>::max());
    }
  });
  EXPECT_EQ(attempts(20'000).find('x'), std::string::npos);
  done.store(true);
  other.join();
}

TEST(OomInjector, AFailedAllocationLeavesNoBytes) {
  const PeakMeter meter(at::kCPU);
  const OomInjector injector(1);
  EXPECT_THROW(tensor_of(1000), c10::OutOfMemoryError);
  EXPECT_EQ(meter.peak(), 0);
}

TEST(OomInjector, TheErrorSaysThatItWasInjectedAndIsClassified) {
  const OomInjector injector(1);
  try {
    tensor_of(4097);
    FAIL() << "should have failed";
  } catch (const c10::OutOfMemoryError& error) {
    EXPECT_CONTAINS(std::string(error.what()), "injected by brim::testing::OomInjector");
    const OomCause cause = classify(error);
    EXPECT_EQ(cause.kind, OomKind::host_memory);
    EXPECT_EQ(cause.requested, 4097);
  }
}

TEST(OomInjector, WorksUnderABudget) {
  const Budget budget(memory_stats(at::kCPU).allocated + 100, at::kCPU);
  const OomInjector injector(2);
  EXPECT_EQ(attempts(3), ".x.");
  EXPECT_THROW(tensor_of(101), c10::OutOfMemoryError);
  EXPECT_EQ(injector.allocations(), 4) << "one that the budget refuses counts as well";
  EXPECT_EQ(injector.failures(), 1);
}

TEST(OomInjector, ReachesAllocationsInsideAnOperator) {
  const at::Tensor x = at::ones({10, 10});
  const OomInjector injector(1);
  EXPECT_THROW(x.matmul(x), c10::OutOfMemoryError);
}

TEST(OomInjector, InsideBackwardItArrivesAsOutOfMemoryError) {
  const at::Tensor x = at::ones({1000}).requires_grad_();
  const at::Tensor loss = x.mul(x).sum();
  const PeakMeter meter(at::kCPU);
  {
    const OomInjector injector(2);  // the first is the gradient of the loss itself
    EXPECT_THROW(loss.backward({}, /*retain_graph=*/true), c10::OutOfMemoryError);
    EXPECT_EQ(injector.failures(), 1);
  }
  EXPECT_EQ(meter.left(), 0) << "the failed attempt is gone";
  loss.backward();
  EXPECT_TRUE(x.grad().eq(2).all().item<bool>()) << "and the next one works";
}

TEST(OomInjector, WrongArgumentsAreRefused) {
  for (const std::int64_t wrong :
       {std::int64_t{0}, std::int64_t{-1}, std::numeric_limits<std::int64_t>::min()}) {
    const std::string number = std::to_string(wrong);
    const std::string at = tests::message_of<c10::ValueError>([&] { OomInjector{wrong}; });
    EXPECT_CONTAINS(at, "at must be 1 or more");
    EXPECT_CONTAINS(at, number);
    const std::string count = tests::message_of<c10::ValueError>([&] { OomInjector(1, wrong); });
    EXPECT_CONTAINS(count, "count must be 1 or more, got " + number);
  }
  EXPECT_CONTAINS(
      tests::message_of<c10::ValueError>([] { OomInjector(1, 1, c10::Device("mps:0")); }),
      "device must be cpu or cuda, got mps:0");
  EXPECT_EQ(attempts(2), "..") << "a refused injector injects nothing";
}

}  // namespace
}  // namespace brim::testing
