// Sizes of training steps: gradients that a step leaves to the next, and an optimizer that needs
// more than the layers do.

#include <brim/adapt/adapt.h>
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
  }
};

/// The sizes that four calls used in the end.
std::vector<std::int64_t> sizes_used(TrainingStep step, std::int64_t first) {
  SizeMemory memory;
  std::vector<std::int64_t> used;
  for (int call = 0; call < 4; ++call) {
    batch(first,
          [&](std::int64_t size) {
            step(size);
            used.resize(static_cast<std::size_t>(call) + 1);
            used.back() = size;
          },
          {.memory = &memory});
  }
  return used;
}

TEST(TrainingSteps, AStepThatItsOptimizerLimitsGrowsToWhatFits) {
  const CapturedWarnings warnings;  // of gradients that a failure leaves
  const Budget budget = room_for(1'200'000 + 100 * 59 + 50);
  EXPECT_EQ(sizes_used({900, 600'000, 100'000, 500'000}, 200),
            (std::vector<std::int64_t>{50, 46, 59, 59}))
      << "46 shows how the optimizer's step grows";
}

TEST(TrainingSteps, GradientsThatAFailureLeftAreFreeAgain) {
  const CapturedWarnings warnings;
  const Budget budget = room_for(490'000 + 100 * 5 + 50);
  EXPECT_EQ(sizes_used({5'000, 0, 450'000, 40'000}, 50).front(), 3) << "as halving";
}

}  // namespace
}  // namespace brim
