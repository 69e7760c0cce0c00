#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <brim/adapt/adapt.h>
#include <brim/adapt/saved_state.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "adapt/calls.h"

namespace brim {
namespace {

using namespace tests;

/// As torch::nn::Module, which takes ten seconds to include.
struct Module {
  std::vector<at::Tensor> weights{at::ones({3}).requires_grad_(true)};
  std::vector<at::Tensor> statistics{at::zeros({2})};

  std::vector<at::Tensor> parameters() const { return weights; }
  std::vector<at::Tensor> buffers() const { return statistics; }
};

TEST(SavedState, ValuesAndGradientsComeBack) {
  at::Tensor tensor = at::zeros({3});
  SavedState state;
  state.add(tensor);
  tensor.add_(1);
  tensor.mutable_grad() = at::ones({3});
  state.put_back();
  EXPECT_TRUE(tensor.equal(at::zeros({3})));
  EXPECT_FALSE(tensor.grad().defined());
}

TEST(SavedState, ATensorOfOtherShapeStridesOrPlaceInItsMemoryIsAsBefore) {
  using Change = void (*)(at::Tensor&);
  for (const Change change : {Change([](at::Tensor& each) { each.unsqueeze_(0); }),
                              Change([](at::Tensor& each) { each.t_(); }),
                              Change([](at::Tensor& each) { each.as_strided_({1, 2}, {2, 1}, 0); }),
                              Change([](at::Tensor& each) { each.as_strided_({2, 2}, {2, 1}, 1); }),
                              Change([](at::Tensor& each) { each.set_(at::ones({2, 2})); })}) {
    const at::Tensor memory = at::zeros({5});
    at::Tensor tensor = memory.as_strided({2, 2}, {2, 1}, 0);
    SavedState state;
    state.add_values(tensor);
    change(tensor);
    tensor.fill_(7);
    state.put_back();
    EXPECT_EQ(tensor.sizes(), (std::vector<std::int64_t>{2, 2}));
    EXPECT_EQ(tensor.strides(), (std::vector<std::int64_t>{2, 1}));
    EXPECT_EQ(tensor.storage_offset(), 0);
    EXPECT_TRUE(tensor.is_alias_of(memory));
    EXPECT_TRUE(tensor.equal(at::zeros({2, 2})));
  }
}

TEST(SavedState, AGradientThatWasThereKeepsItsTensor) {
  at::Tensor tensor = at::zeros({3});
  const at::Tensor gradient = at::ones({3});
  tensor.mutable_grad() = gradient;
  SavedState state;
  state.add_gradient(tensor);
  gradient.mul_(5);
  tensor.mutable_grad() = at::zeros({3});
  state.put_back();
  EXPECT_TRUE(tensor.grad().is_same(gradient));
  EXPECT_TRUE(gradient.equal(at::ones({3})));
}

TEST(SavedState, WhetherAGradientIsRequiredComesBack) {
  Module module;
  const at::Tensor frozen = at::zeros({3});
  SavedState state;
  detail::add_to(state, module);
  state.add(frozen);
  module.weights[0].requires_grad_(false);
  frozen.requires_grad_(true);
  state.put_back();
  EXPECT_TRUE(module.weights[0].requires_grad());
  EXPECT_FALSE(frozen.requires_grad());
}

TEST(SavedState, ATensorIsDetachedFromWhatAnAttemptWroteToIt) {
  const at::Tensor mean = at::zeros({3});
  const at::Tensor weight = at::ones({3}).requires_grad_(true);
  SavedState state;
  state.add_values(mean);
  mean.add_(weight);
  ASSERT_TRUE(mean.requires_grad());
  state.put_back();
  EXPECT_FALSE(mean.requires_grad()) << "the graph of the failed attempt would stay alive";
  EXPECT_TRUE(mean.equal(at::zeros({3})));
}

TEST(SavedState, CanBePutBackMoreThanOnce) {
  const at::Tensor tensor = at::zeros({3});
  int calls = 0;
  SavedState state;
  state.add(tensor);
  state.add([&] { ++calls; });
  for (int i = 0; i < 2; ++i) {
    tensor.add_(1);
    state.put_back();
    EXPECT_TRUE(tensor.equal(at::zeros({3})));
  }
  EXPECT_EQ(calls, 2);
}

TEST(SavedState, VersionsStayAsTheyAre) {
  const at::Tensor leaf = at::ones({3}).requires_grad_(true);
  SavedState state;
  state.add(leaf);
  const auto before = leaf._version();
  state.put_back();
  EXPECT_EQ(leaf._version(), before);
  EXPECT_TRUE(leaf.requires_grad());
}

TEST(SavedState, CopiesOnlyWhatIsThere) {
  install_cpu_allocator();
  const Module module;
  const std::int64_t before = held_now();
  SavedState state;
  restoring(module)(state);
  EXPECT_EQ(held_now() - before, 2 * 4) << "the buffer; there is no gradient";
  restoring(module, module.statistics.front())(state);
  EXPECT_EQ(held_now() - before, 2 * 4) << "nothing is copied twice";
}

TEST(SavedState, KnowsWhoseValuesItHas) {
  const at::Tensor tensor = at::zeros({3});
  SavedState state;
  EXPECT_FALSE(state.has_values(tensor));
  state.add_values(tensor);
  EXPECT_TRUE(state.has_values(tensor));
  EXPECT_TRUE(state.has_values(tensor.narrow(0, 1, 2)));
  EXPECT_FALSE(state.has_values(at::zeros({3})));
}

TEST(SavedState, UndefinedTensorsAreRefused) {
  SavedState state;
  EXPECT_THROW(state.add(at::Tensor()), c10::ValueError);
}

struct GradientStep {
  Module module;

  void run() const {
    batch(8,
          [&](std::int64_t size) {
            const at::Tensor scratch = tensor_of(64 * size);
            at::Tensor weight = module.weights.front();
            weight.mutable_grad() = weight.grad().defined() ? weight.grad().add(1) : at::ones({3});
            module.statistics.front().add_(1);
            const at::Tensor later = tensor_of(64 * size);
          },
          {.restore = restoring(module)});
  }
  at::Tensor result() const {
    return module.weights.front().grad().add(module.statistics.front().sum());
  }
};

TEST(SavedState, AnAdaptiveCallIsTheSameWhereverItFails) {
  expect_same_state_wherever_it_fails<GradientStep>();
}

TEST(SavedState, EachPartOfARangeIsUndoneByItself) {
  const at::Tensor total = at::zeros({1});
  bool failed = false;
  range(0, 10, 2,
        [&](std::int64_t begin, std::int64_t end) {
          total.add_(static_cast<double>(end - begin));
          if (begin == 4 && !std::exchange(failed, true)) {
            throw_out_of_memory();
          }
        },
        {.strategy = Strategy::halving, .restore = restoring(total)});
  EXPECT_TRUE(failed);
  EXPECT_EQ(total.item<float>(), 10);
}

TEST(SavedState, TheStateBeforeStaysAfterAFailureForGood) {
  const at::Tensor total = at::zeros({1});
  EXPECT_THROW(batch(8,
                     [&](std::int64_t) {
                       total.add_(1);
                       throw_out_of_memory();
                     },
                     {.restore = restoring(total)}),
               c10::OutOfMemoryError);
  EXPECT_EQ(total.item<float>(), 0);
}

}  // namespace
}  // namespace brim
