// Sizes of training steps: gradients that a step leaves to the next, and an optimizer that needs
// more than the layers do.

#include <brim/adapt/adapt.h>
#include <brim/need/size_search.h>
#include <brim/predict/allocation_record.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "adapt/calls.h"

namespace brim {
namespace {

using namespace tests;

struct TrainingStep {
  std::int64_t activation_bytes;  // for each item
  std::int64_t state_bytes;
  std::int64_t gradient_bytes;
  std::int64_t optimizer_bytes;  // while it runs
  bool frees_at_end = false;     // the gradients, too
  at::Tensor gradients{};
  at::Tensor state{};

  void operator()(std::int64_t size) {
    gradients.reset();
    const at::Tensor input = tensor_of(100 * size);
    {
      const at::Tensor activations = tensor_of(activation_bytes * size);
      gradients = tensor_of(gradient_bytes);
    }
    if (!state.defined() && state_bytes > 0) {
      state = tensor_of(state_bytes);
    }
    const at::Tensor temporary = tensor_of(optimizer_bytes);
    if (frees_at_end) {
      gradients.reset();
    }
  }
};

/// The sizes that each of four calls tried.
std::vector<std::vector<std::int64_t>> sizes_tried(TrainingStep step, std::int64_t first) {
  SizeMemory memory;
  std::vector<std::vector<std::int64_t>> tried(4);
  for (auto& sizes : tried) {
    batch(first,
          [&](std::int64_t size) {
            sizes.push_back(size);
            step(size);
          },
          {.memory = &memory});
  }
  return tried;
}

TEST(TrainingSteps, AStepThatItsOptimizerLimitsGrowsToWhatFits) {
  const CapturedWarnings warnings;  // of gradients that a failure leaves
  const Budget budget = room_for(1'200'000 + 100 * 59 + 50);
  EXPECT_EQ(sizes_tried({900, 600'000, 100'000, 500'000}, 200),
            (std::vector<std::vector<std::int64_t>>{{200, 100, 97, 50}, {46}, {59}, {59}}))
      << "46 shows how the optimizer's step grows";
}

TEST(TrainingSteps, GradientsThatAFailureLeftAreFreeAgain) {
  const CapturedWarnings warnings;
  const Budget budget = room_for(490'000 + 100 * 5 + 50);
  EXPECT_EQ(sizes_tried({5'000, 0, 450'000, 40'000}, 50).front().back(), 3) << "as halving";
}

TEST(TrainingSteps, AStateAsLargeAsTheGradientsIsNotFreedAsTheyAre) {
  const CapturedWarnings warnings;
  // The first try fails when it has gradients and no state. The next one frees these, and leaves as
  // many bytes for good.
  const Budget budget = room_for(2'000'000 + 100 * 50 + 50);
  const auto tried = sizes_tried({50, 1'000'000, 1'000'000, 0, true}, 90);
  EXPECT_EQ(tried.front(), (std::vector<std::int64_t>{90, 45}));
  EXPECT_EQ(tried[1].size(), 1U) << "no failure";
  EXPECT_EQ(tried[2], (std::vector<std::int64_t>{33}));
}

TEST(TrainingSteps, AFailureThatLeftTheStateDoesNotHoldSizesBack) {
  const CapturedWarnings warnings;
  const Budget budget = room_for(1'001'000 + 100 * 51 + 50);
  const auto tried = sizes_tried({90, 600'000, 1'000, 400'000}, 96);
  EXPECT_EQ(tried.front(), (std::vector<std::int64_t>{96, 48}));
  EXPECT_EQ(tried[2], (std::vector<std::int64_t>{51}));
}

/// A step that needs `constant` bytes and `growing` ones for each item.
Attempt recorded_step(std::int64_t size, std::int64_t available, std::int64_t constant,
                      std::int64_t growing) {
  const std::vector<AllocationEvent> events{{.address = 1, .bytes = constant},
                                            {.address = 2, .bytes = growing * size},
                                            {.address = 2, .freed = true},
                                            {.address = 1, .freed = true}};
  return {.values = {size},
          .peak = constant + growing * size,
          .available = available,
          .record = record_of(events)};
}

TEST(TrainingSteps, TheSameSizeInLessMemoryWouldShowNothing) {
  SizeSearch search({.upper = 29, .available = 4'700'000});
  search.remember(Attempt{.values = {14},
                          .outcome = OomKind::host_memory,
                          .peak = 5'700'000,
                          .requested = 1'100'000,
                          .available = 6'000'000});
  search.remember(recorded_step(7, 6'000'000, 640'000, 440'000));
  EXPECT_EQ(search.next(), 6) << "7 is all that is expected to fit, and known";
  search = SizeSearch({.upper = 29, .available = 4'700'000});
  search.remember(recorded_step(7, 6'000'000, 640'000, 440'000));
  search.remember(recorded_step(6, 4'700'000, 640'000, 440'000));
  EXPECT_EQ(search.next(), 9);
}

TEST(TrainingSteps, ActivationsThatFailedDoNotHideThatTheOptimizerHasRoom) {
  SizeSearch search({.upper = 36, .available = 185'744});
  search.remember(Attempt{.values = {18},
                          .outcome = OomKind::host_memory,
                          .peak = 179'720,
                          .requested = 41'472,
                          .available = 185'744});
  search.remember(recorded_step(9, 185'744, 182'800, 256));
  EXPECT_EQ(search.next(), 8) << "to see how the optimizer's step grows";
  search.remember(recorded_step(8, 185'744, 182'800, 256));
  EXPECT_EQ(search.next(), 11);
}

TEST(TrainingSteps, WhatAFitWithoutTheStateNeededIsNotHeldBack) {
  SizeSearch search({.upper = 61, .available = 329'816});
  search.remember(Attempt{.values = {61}, .peak = 551'844, .available = 601'832});
  search.remember(recorded_step(6, 329'816, 323'224, 128));
  search.remember(recorded_step(7, 329'816, 323'224, 128));
  EXPECT_EQ(search.next(), 51);
}

}  // namespace
}  // namespace brim
