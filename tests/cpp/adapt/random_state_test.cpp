#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randperm.h>
#include <brim/adapt/detail/random_state.h>
#include <brim/runtime.h>
#include <gtest/gtest.h>

#include <future>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "tensors.h"

namespace brim {
namespace {

at::Generator generator() { return at::detail::getDefaultCPUGenerator(); }

/// The whole state, as torch itself gives it out: the reference.
at::Tensor torch_state() {
  at::Generator it = generator();
  return it.get_state().clone();
}

void draw(int kind) {
  switch (kind) {
    case 0:
      at::rand({7});
      break;
    case 1:
      at::randn({1});  // leaves half of a pair of normal samples for the next call
      break;
    case 2:
      at::randn({100});
      break;
    case 3:
      at::randperm(20);
      break;
    case 4:
      at::rand({2000});  // more than one block of the engine
      break;
    case 5:
      at::randn({1}, at::kDouble);
      break;
    case 6:  // no operator of today's leaves one, but it is part of the state
      at::check_generator<at::CPUGeneratorImpl>(generator())
          ->set_next_float_normal_sample(static_cast<float>(at::rand({1}).item<double>()));
      break;
    default:
      at::manual_seed(static_cast<std::uint64_t>(kind));
  }
}

TEST(RandomState, RestoredGeneratorDrawsTheSameNumbers) {
  at::manual_seed(7);
  at::randn({1});
  const RandomState state(at::kCPU);
  const auto numbers = [] {
    return std::vector<at::Tensor>{at::randn({1}), at::rand({1000}), at::randperm(50),
                                   at::randn({33}), at::dropout(at::rand({64}), 0.5, true)};
  };
  const auto first = numbers();
  state.restore();
  const auto second = numbers();
  for (std::size_t i = 0; i < first.size(); ++i) {
    EXPECT_TRUE(first[i].equal(second[i])) << i;
  }
  EXPECT_FALSE(first[1].equal(numbers()[1])) << "unless it is restored, it moves on";
}

TEST(RandomState, WaitsForTheGeneratorByTheWaiter) {
  static std::promise<void> waiting;
  at::manual_seed(1);
  std::promise<void> locked;
  std::thread drawing([&] {  // as an operator that draws for long
    const std::lock_guard lock(generator().mutex());
    locked.set_value();
    waiting.get_future().wait();
  });
  locked.get_future().wait();
  set_waiter([](void (*wait)(const void*), const void* context) {
    waiting.set_value();
    wait(context);
  });
  const RandomState state(at::kCPU);
  set_waiter(nullptr);
  drawing.join();
  const at::Tensor first = at::rand({4});
  state.restore();
  EXPECT_TRUE(at::rand({4}).equal(first));
}

TEST(RandomState, RestoresTheSeedToo) {
  at::manual_seed(42);
  const RandomState state(at::kCPU);
  at::manual_seed(43);
  state.restore();
  EXPECT_EQ(generator().current_seed(), 42U);
}

TEST(RandomState, AnyOfSeveralCanBeRestoredInAnyOrderAnyNumberOfTimes) {
  std::mt19937 random(5);
  std::vector<std::pair<RandomState, at::Tensor>> states;
  for (int step = 0; step < 3000; ++step) {
    switch (random() % 4) {
      case 0:
        states.emplace_back(RandomState(at::kCPU), torch_state());
        break;
      case 1:
        draw(static_cast<int>(random() % 10));
        break;
      case 2:
        if (!states.empty()) {
          const auto& [state, expected] = states[random() % states.size()];
          state.restore();
          ASSERT_TRUE(torch_state().equal(expected)) << "at step " << step;
        }
        break;
      default:
        if (states.size() > 8) {  // their snapshots are shared, and one is reused when it is free
          states.erase(states.begin() + static_cast<std::ptrdiff_t>(random() % states.size()));
        }
    }
  }
}

TEST(RandomState, OneThatWasTakenOverByAnotherStillRestores) {
  at::manual_seed(3);
  RandomState first(at::kCPU);
  const at::Tensor expected = torch_state();
  at::rand({10});
  RandomState second(at::kCPU);
  at::rand({10});
  second = std::move(first);
  const RandomState third(std::move(second));
  third.restore();
  EXPECT_TRUE(torch_state().equal(expected));
}

TEST(RandomState, ThreadsHaveTheirOwn) {
  tests::in_threads(8, [](int) {
    for (int i = 0; i < 200; ++i) {
      const RandomState outer(at::kCPU);
      at::rand({3});
      RandomState inner(at::kCPU);
      inner.restore();
      outer.restore();
    }
  });
}

}  // namespace
}  // namespace brim
