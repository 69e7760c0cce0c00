// collect_peaks, the plan of the probes, and probe_memory, on the CPU.

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <brim/memory/budget.h>
#include <brim/memory/bytes.h>
#include <brim/memory/peak_meter.h>
#include <brim/memory/stats.h>
#include <brim/predict/collect_peaks.h>
#include <brim/predict/probe.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <new>
#include <stdexcept>
#include <utility>
#include <vector>

#include "predict/probe_plan.h"
#include "tensors.h"

namespace brim {
namespace {

using detail::ProbePlan;
using tests::kMiB;
using tests::message_of;
using tests::tensor_of;

using Shapes = std::vector<std::pair<std::int64_t, std::int64_t>>;

Shapes grid(const std::vector<std::int64_t>& ns, const std::vector<std::int64_t>& lengths) {
  Shapes result;
  result.reserve(ns.size() * lengths.size());
  for (const std::int64_t n : ns) {
    for (const std::int64_t length : lengths) {
      result.emplace_back(n, length);
    }
  }
  return result;
}

// ---------------------------------------------------------------- collect_peaks

TEST(CollectPeaks, OnlyWhatIsHeldAllTheTimeIsTheBase) {
  const at::Tensor kept = tensor_of(3000);
  at::Tensor replaced = tensor_of(1000);
  const auto work = [&](std::size_t index) {
    if (index == 1) {
      replaced.reset();  // as a step does with the gradients of the last one
    }
    replaced = tensor_of(1000);
    return 0.0;
  };
  const auto samples = collect_peaks(work, 2, {.device = at::kCPU});
  EXPECT_EQ(samples[0].base, samples[0].start);
  EXPECT_EQ(samples[1].base, samples[1].start - 1000);
}

TEST(CollectPeaks, AKernelOfOnednnThatWasRefusedMemoryIsOutOfMemory) {
  at::Context& context = at::globalContext();
  const bool before = context.userEnabledMkldnn();
  context.setUserEnabledMkldnn(true);
  const std::vector<PeakSample> samples = collect_peaks(
      [&](std::size_t i) {
        context.setUserEnabledMkldnn(i != 0);  // as torch does, before it takes another kernel
        return 0.0;
      },
      2, {.device = c10::Device(at::kCPU)});
  EXPECT_TRUE(samples[0].out_of_memory);
  EXPECT_FALSE(samples[0].requested);
  EXPECT_FALSE(samples[1].out_of_memory);
  EXPECT_TRUE(context.userEnabledMkldnn());
  context.setUserEnabledMkldnn(false);
  EXPECT_FALSE(collect_peaks([](std::size_t) { return 0.0; }, 1, {.device = c10::Device(at::kCPU)})
                   .front()
                   .out_of_memory)
      << "switched off by the user";
  context.setUserEnabledMkldnn(before);
}

TEST(CollectPeaks, SamplesAreAlignedAndAbsolute) {
  const std::vector<std::int64_t> sizes{3 * kMiB, kMiB, 2 * kMiB};
  static_cast<void>(PeakMeter(at::kCPU));  // counts from here on
  const at::Tensor older = tensor_of(5 * kMiB);
  const std::vector<PeakSample> samples = collect_peaks(
      [](std::int64_t size) {
        const at::Tensor x = tensor_of(size);
        return static_cast<double>(x.numel());
      },
      sizes, {.device = at::kCPU});
  ASSERT_EQ(samples.size(), 3U);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(samples[i].feature, static_cast<double>(sizes[i]));
    EXPECT_EQ(samples[i].peak, samples[i].start + sizes[i]);
    EXPECT_GE(samples[i].start, 5 * kMiB) << "older tensors count";
    EXPECT_FALSE(samples[i].out_of_memory);
  }
}

TEST(CollectPeaks, OutOfMemoryStaysAsALowerBoundAndLeavesNothingBehind) {
  const Budget budget(8 * kMiB, at::kCPU);
  std::vector<std::int64_t> held_at_cleanup;
  const CollectOptions options{.device = at::kCPU, .cleanup = [&] {
                                 held_at_cleanup.push_back(memory_stats(at::kCPU).allocated);
                               }};
  const std::vector<std::int64_t> sizes{kMiB, 6 * kMiB, 2 * kMiB};
  const std::vector<PeakSample> samples = collect_peaks(
      [](std::int64_t size) {
        const at::Tensor x = tensor_of(size);
        const at::Tensor y = tensor_of(size);
        return 1.0;
      },
      sizes, options);
  ASSERT_EQ(samples.size(), 3U);
  EXPECT_TRUE(samples[1].out_of_memory);
  EXPECT_FALSE(samples[1].feature);
  EXPECT_EQ(samples[1].requested, 6 * kMiB);
  EXPECT_EQ(samples[1].peak - samples[1].start, 12 * kMiB) << "held and asked for";
  EXPECT_FALSE(samples[2].out_of_memory);
  EXPECT_EQ(held_at_cleanup, std::vector<std::int64_t>(3, samples[0].start));
}

TEST(CollectPeaks, AnotherErrorPassesAfterCleanup) {
  int cleaned = 0;
  const std::vector<int> inputs{1, 2, 3};
  const auto work = [](int input) -> double {
    if (input == 2) {
      throw std::domain_error("two");
    }
    return 0;
  };
  EXPECT_EQ(message_of<std::domain_error>([&] {
              collect_peaks(work, inputs, {.device = at::kCPU, .cleanup = [&] { ++cleaned; }});
            }),
            "two");
  EXPECT_EQ(cleaned, 2);
  // Of two errors the first one explains the second.
  EXPECT_EQ(message_of<std::domain_error>([&] {
              collect_peaks(
                  [](int) -> double { throw std::domain_error("first"); }, inputs,
                  {.device = at::kCPU, .cleanup = [] { throw std::runtime_error("second"); }});
            }),
            "first");
}

// ---------------------------------------------------------------- the plan

struct Planned {
  Shapes shapes;
  double highest = 0;
  int failures = 0;
};

Planned follow(ProbePlan& plan, const std::function<double(double, double)>& need, double limit) {
  Planned result;
  while (const auto shape = plan.next(limit)) {
    const double bytes =
        need(static_cast<double>(shape->first), static_cast<double>(shape->second));
    result.shapes.push_back(*shape);
    result.highest = std::max(result.highest, bytes);
    result.failures += bytes > limit ? 1 : 0;
    plan.add(*shape, std::min(bytes, limit), 0, bytes > limit);
  }
  return result;
}

const std::vector<std::int64_t> kNs{1, 2, 3, 5, 8, 13, 24, 32, 48, 64};
const std::vector<std::int64_t> kLengths{16, 32, 50, 64, 100, 128, 200, 256, 384, 512};

TEST(ProbePlan, SevenProbesReachTheCornersWhereThereIsRoom) {
  ProbePlan plan(grid(kNs, kLengths), SizeKind::batch, 7);
  const Planned planned =
      follow(plan, [](double n, double l) { return 1e6 + 1e3 * n * l + 10 * n * l * l; }, 1e12);
  EXPECT_EQ(planned.shapes.size(), 7U);
  EXPECT_EQ(planned.shapes.front(), std::pair(std::int64_t{1}, std::int64_t{16}));
  for (const auto& corner : grid({1, 64}, {16, 512})) {
    EXPECT_NE(std::find(planned.shapes.begin(), planned.shapes.end(), corner), planned.shapes.end())
        << corner.first << ", " << corner.second;
  }
}

TEST(ProbePlan, StaysBelowTheLimitAndComesNearIt) {
  for (const double limit : {3e7, 1e8, 1e9}) {
    for (const double floor : {0.0, 1.5e7}) {
      for (const double c : {0.0, 10.0}) {
        ProbePlan plan(grid(kNs, kLengths), SizeKind::batch, 7);
        const Planned planned = follow(
            plan,
            [&](double n, double l) { return std::max(floor, 2e6 + 4e4 * n * l + c * n * l * l); },
            limit);
        EXPECT_EQ(planned.failures, 0) << limit << " " << floor << " " << c;
        EXPECT_EQ(planned.shapes.size(), 7U);
        const double most = std::min(limit, 2e6 + 4e4 * 64 * 512);
        EXPECT_GT(planned.highest, 0.4 * most) << limit << " " << floor << " " << c;
      }
    }
  }
}

TEST(ProbePlan, AFailureClosesEverythingLarger) {
  ProbePlan plan(grid({1, 2, 4, 8}, {1, 2, 4, 8}), SizeKind::batch, 12);
  static_cast<void>(plan.next(1e9));
  plan.add({1, 1}, 10, 0, false);
  plan.add({2, 2}, 100, 0, true);
  while (const auto shape = plan.next(1e9)) {
    EXPECT_FALSE(shape->first >= 2 && shape->second >= 2);
    plan.add(*shape, 10 * static_cast<double>(shape->first * shape->second), 0, false);
  }
  EXPECT_EQ(plan.samples().size(), 8U) << "one row, one column, and the failure";
}

TEST(ProbePlan, OneSizeIsSpreadFromLeastToMost) {
  Shapes sizes;
  for (std::int64_t size = 1; size <= 4096; ++size) {
    sizes.emplace_back(size, 0);
  }
  ProbePlan plan(sizes, SizeKind::size, 7);
  const Planned planned = follow(plan, [](double s, double) { return 100 + 8 * s; }, 1e9);
  const Shapes expected{{1, 0}, {4, 0}, {16, 0}, {64, 0}, {256, 0}, {1024, 0}, {4096, 0}};
  EXPECT_EQ(planned.shapes, expected);
}

TEST(ProbePlan, ManyStepsLeadToTheLargestSizeWhereAFloorHidesGrowth) {
  Shapes sizes;
  for (std::int64_t size = 1; size <= 512; ++size) {
    sizes.emplace_back(size, 0);
  }
  const auto need = [](double s, double) { return 5e6 + 5e3 * s; };
  ProbePlan enough(sizes, SizeKind::size, 7);
  const Planned planned = follow(enough, need, 32e6);  // each at most 2.5 times the one before
  EXPECT_EQ(planned.shapes.back().first, 512);
  EXPECT_LE(planned.shapes.size(), 9U);
  sizes.erase(sizes.begin(), sizes.begin() + 63);
  ProbePlan narrow(sizes, SizeKind::size, 7);  // each at most 1.06 times the one before
  EXPECT_EQ(follow(narrow, need, 6e6).shapes.size(), 14U) << "not for as long as it takes";
}

TEST(ProbePlan, WrongCandidatesAreNamed) {
  using Error = std::invalid_argument;
  const auto plan = [](Shapes shapes, SizeKind kind, std::int64_t probes) {
    return message_of<Error>([&] { const ProbePlan made(std::move(shapes), kind, probes); });
  };
  EXPECT_CONTAINS(plan({}, SizeKind::size, 7), "at least 2 different ones for a fit, got 0");
  EXPECT_CONTAINS(plan({{1, 1}, {1, 1}, {2, 1}}, SizeKind::batch, 7), "at least 3 different ones");
  EXPECT_CONTAINS(plan({{1, 0}, {-4, 0}}, SizeKind::size, 7), "positive, got -4");
  EXPECT_CONTAINS(plan({{1, 1}, {1, 0}}, SizeKind::batch, 7), "positive, got 0");
  EXPECT_CONTAINS(plan(grid({1, 2}, {1, 2}), SizeKind::batch, 2),
                  "probes must be 3 or more, got 2");
}

// ---------------------------------------------------------------- probe_memory

TEST(ProbeMemory, FindsBytesASizeAndRunsTheSmallestOnceMore) {
  std::vector<std::int64_t> calls;
  const MemoryModel model = probe_memory(
      [&](std::int64_t size) {
        calls.push_back(size);
        static_cast<void>(tensor_of(size * 4096));
      },
      {1, 10, 100, 1000}, {.device = at::kCPU});
  EXPECT_EQ(calls, (std::vector<std::int64_t>{1, 1, 10, 100, 1000}));
  EXPECT_EQ(model.samples().size(), 4U);
  EXPECT_NEAR(model.peak(500) - model.peak(400), 409600, 1);
}

TEST(ProbeMemory, BudgetIsKeptAndAPairIsABatch) {
  const std::int64_t held = memory_stats(at::kCPU).allocated;
  std::int64_t largest = 0;
  const MemoryModel model = probe_memory(
      [&](std::int64_t n, std::int64_t length) {
        largest = std::max(largest, n * length * 64);
        static_cast<void>(tensor_of(n * length * 64));
      },
      grid(kNs, kLengths), {.device = at::kCPU, .budget = held + kMiB});
  EXPECT_LE(largest, kMiB);
  EXPECT_GT(largest, kMiB / 2);
  EXPECT_EQ(model.kind(), SizeKind::batch);
  const auto budget = static_cast<double>(held + 16 * kMiB);
  EXPECT_NEAR(static_cast<double>(model.largest_batch(512, budget)), 512, 26);
}

TEST(ProbeMemory, SizesNearTheBudgetAreMeasuredBetweenTheCandidates) {
  const std::int64_t held = memory_stats(at::kCPU).allocated;
  std::int64_t largest = 0;
  const auto work = [&](std::int64_t size) {
    largest = std::max(largest, size);
    static_cast<void>(tensor_of(100'000 + size * 64 + size * size / 16));
  };
  ProbeOptions options{.device = at::kCPU, .budget = held + kMiB};
  const std::vector<std::int64_t> sizes{1, 4, 16, 64, 1'000'000};
  static_cast<void>(probe_memory(work, sizes, options));
  EXPECT_EQ(largest, 64);
  options.near_budget = 5;
  const MemoryModel model = probe_memory(work, sizes, options);
  EXPECT_GT(largest, 3000);  // 3412 is the largest that fits
  EXPECT_LE(largest, 3412);
  EXPECT_LE(model.samples().size(), 4U + 5U);
  options.near_budget = -1;
  EXPECT_CONTAINS(message_of<std::invalid_argument>([&] { probe_memory(work, sizes, options); }),
                  "near_budget must be 0 or more, got -1");
  options.near_budget = 2;
  const auto batches = [](std::int64_t, std::int64_t) {};
  EXPECT_CONTAINS(message_of<std::invalid_argument>(
                      [&] { probe_memory(batches, grid(kNs, kLengths), options); }),
                  "near_budget must be 0 for batches, got 2");
}

TEST(ProbeMemory, OutOfMemoryThatHappensAnywayIsABound) {
  const Budget budget(64 * kMiB, at::kCPU);
  int large = 0;
  // No size grows so fast that this could be foreseen.
  const MemoryModel model = probe_memory(
      [&](std::int64_t size) {
        large += size < 50 ? 0 : 1;
        static_cast<void>(tensor_of(size < 50 ? size : 128 * kMiB));
      },
      {1, 4, 16, 64, 256}, {.device = at::kCPU});
  EXPECT_EQ(large, 1);  // the device explains the failure, so it is not repeated
  const auto failed = std::count_if(model.samples().begin(), model.samples().end(),
                                    [](const MemorySample& s) { return s.out_of_memory; });
  EXPECT_EQ(failed, 1);
  EXPECT_GE(model.peak(64), 128.0 * kMiB);
}

TEST(ProbeMemory, OutOfMemoryOfUnknownSizeIsAboveTheBudget) {
  const auto budget = memory_stats(at::kCPU).allocated + kMiB;
  const MemoryModel model = probe_memory(
      [](std::int64_t size) {
        static_cast<void>(tensor_of(size));
        if (size > 100) {
          throw std::bad_alloc();  // says nothing about bytes
        }
      },
      {1, 10, 100, 1000, 10000}, {.device = at::kCPU, .budget = budget});
  EXPECT_LT(model.largest_size(static_cast<double>(budget)), 10000);
}

TEST(ProbeMemory, WorkThatHoldsNothingIsRefused) {
  if (memory_stats(at::kCPU).allocated > 0) {
    GTEST_SKIP() << "something else is held";
  }
  EXPECT_CONTAINS(
      message_of<c10::ValueError>([] {
        static_cast<void>(probe_memory([](std::int64_t) {}, {1, 2, 3}, {.device = at::kCPU}));
      }),
      "held no memory on cpu");
}

TEST(ProbeMemory, OneFailureThatTheDeviceDoesNotExplainIsMeasuredAgain) {
  for (int at = 1; at <= 3; ++at) {  // the call to warm up, and both that are measured
    int calls = 0;
    const MemoryModel model = probe_memory(
        [&](std::int64_t size) {
          TORCH_CHECK_WITH(OutOfMemoryError, ++calls != at,
                           "CPU out of memory. Tried to allocate 1.00 KiB");
          static_cast<void>(tensor_of(size * 1000));
        },
        {1, 100}, {.device = at::kCPU});
    EXPECT_EQ(calls, 4);
    for (const MemorySample& sample : model.samples()) {
      EXPECT_FALSE(sample.out_of_memory);
    }
  }
}

TEST(ProbeMemory, TwoFailuresWithinTheLimitAreOutOfMemoryNotAWrongBudget) {
  EXPECT_CONTAINS(message_of<c10::OutOfMemoryError>([] {
                    probe_memory(
                        [](std::int64_t size) {
                          TORCH_CHECK_WITH(OutOfMemoryError, size < 100,
                                           "CPU out of memory. Tried to allocate 1.00 KiB");
                          static_cast<void>(tensor_of(size * 1000));
                        },
                        {1, 100}, {.device = at::kCPU});
                  }),
                  "Size 100 failed twice");
}

TEST(ProbeMemory, TooLittleMemoryIsSaid) {
  const Budget budget(kMiB, at::kCPU);
  EXPECT_CONTAINS(message_of<c10::OutOfMemoryError>([&] {
                    probe_memory([](std::int64_t) { static_cast<void>(tensor_of(2 * kMiB)); },
                                 {3, 5}, {.device = at::kCPU});
                  }),
                  "Even the smallest of the sizes, 3, does not fit");
  const std::int64_t held = memory_stats(at::kCPU).allocated;
  EXPECT_CONTAINS(
      message_of<c10::ValueError>([&] {
        probe_memory([](std::int64_t size) { static_cast<void>(tensor_of(size * 1000)); }, {1, 100},
                     {.device = at::kCPU, .budget = held + 2000});
      }),
      "is too small for these sizes: a fit needs 2 of them, but only 1 stays within it. "
      "The smallest, 1, needs " +
          format_bytes(held + 1000) + ", of which " + format_bytes(held) + " were held before");
}

}  // namespace
}  // namespace brim
