#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <brim/adapt/adapt.h>
#include <brim/adapt/restore_optimizer.h>
#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <vector>

#include "adapt/calls.h"

namespace brim {
namespace {

using namespace tests;

torch::optim::AdamOptions options_of(torch::optim::Adam*) { return torch::optim::AdamOptions(0.1); }
torch::optim::SGDOptions options_of(torch::optim::SGD*) {
  return torch::optim::SGDOptions(0.1).momentum(0.9);
}

/// A step that adapts a size, after another one or as the first, and then one more.
template <class Optimizer, bool kStepsBefore>
struct Training {
  at::Tensor parameter = at::ones({4}).requires_grad_(true);
  Optimizer optimizer{std::vector<at::Tensor>{parameter},
                      options_of(static_cast<Optimizer*>(nullptr))};

  Training() {
    if (kStepsBefore) {
      step(1);
    }
  }
  void step(std::int64_t size) {
    parameter.mutable_grad() = parameter.detach().mul(2);
    const at::Tensor scratch = tensor_of(64 * size);
    optimizer.step();
    const at::Tensor later = tensor_of(64 * size);
  }
  void run() {
    const RestoredOptimizer of_optimizer(optimizer);
    batch(8, [&](std::int64_t size) { step(size); }, {.restore = restoring(of_optimizer)});
  }
  at::Tensor result() {
    step(1);
    return parameter.detach().clone();
  }
};

TEST(RestoredOptimizer, AStepIsTheSameWhereverItFails) {
  expect_same_state_wherever_it_fails<Training<torch::optim::Adam, false>>();
  expect_same_state_wherever_it_fails<Training<torch::optim::Adam, true>>();
  expect_same_state_wherever_it_fails<Training<torch::optim::SGD, false>>();
  expect_same_state_wherever_it_fails<Training<torch::optim::SGD, true>>();
}

}  // namespace
}  // namespace brim
