#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <brim/adapt/joint_loss.h>
#include <brim/memory/cpu.h>
#include <brim/testing/oom_injector.h>
#include <gtest/gtest.h>

#include <exception>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "adapt/calls.h"
#include "adapt/microbatches_cases.h"
#include "adapt/thread_ranks.h"

namespace brim {
namespace {

using namespace tests;

/// Two towers, and a loss with a temperature that compares all their rows.
struct Towers {
  Model first;
  Model second;
  at::Tensor scale = at::ones({}, at::kDouble).requires_grad_(true);

  explicit Towers(double dropout = 0.0) : first(dropout), second(dropout) {}

  static at::Tensor rows(const Model& model, const at::Tensor& x) {
    return at::linear(
        at::dropout(at::linear(x, model.weights[0], model.weights[1]).tanh(), model.dropout, true),
        model.weights[2].transpose(0, 1).matmul(model.weights[2]));
  }
  at::Tensor a(const at::Tensor& x) const { return rows(first, x); }
  at::Tensor b(const at::Tensor& x) const { return rows(second, x); }
  at::Tensor loss(const at::Tensor& a, const at::Tensor& b) const {
    return at::cross_entropy_loss(scale.exp() * a.matmul(b.transpose(0, 1)), at::arange(a.size(0)));
  }
  at::Tensor gradients() const {
    return at::cat({first.gradients(), second.gradients(), scale.grad().reshape({1})});
  }
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all = first.weights;
    all.insert(all.end(), second.weights.begin(), second.weights.end());
    all.push_back(scale);
    return all;
  }
  void copy_from(const Towers& other) const {
    const std::vector<at::Tensor> mine = parameters();
    const std::vector<at::Tensor> theirs = other.parameters();
    for (std::size_t i = 0; i < mine.size(); ++i) {
      mine[i].set_data(theirs[i].detach().clone());
    }
  }
  void zero() const {
    for (const at::Tensor& each : parameters()) {
      each.mutable_grad() = at::Tensor();
    }
  }
};

class JointLossTest : public ::testing::Test {
 protected:
  JointLossTest() { at::manual_seed(1); }

  auto step_of(const Towers& own, MicrobatchOptions options) const {
    return std::make_unique<decltype(Microbatches(loss_of(own), encoders_of(own), options))>(
        loss_of(own), encoders_of(own), options);
  }
  struct Loss {
    const Towers& own;
    at::Tensor operator()(const at::Tensor& a, const at::Tensor& b) const { return own.loss(a, b); }
  };
  struct Rows {
    const Model& model;
    at::Tensor operator()(const at::Tensor& x) const { return Towers::rows(model, x); }
  };
  static Loss loss_of(const Towers& own) { return {own}; }
  static std::tuple<Rows, Rows> encoders_of(const Towers& own) {
    return {Rows{own.first}, Rows{own.second}};
  }

  Data data;
  at::Tensor y = at::rand({10, 4}, at::kDouble);
};

TEST_F(JointLossTest, GradientsAreThoseOfTheWholeBatch) {
  const Towers towers;
  const at::Tensor whole = towers.loss(towers.a(data.x), towers.b(y));
  whole.backward();
  const at::Tensor expected = towers.gradients().clone();
  for (const std::int64_t size : {1, 3, 9, 10, 50}) {
    towers.zero();
    const auto step = step_of(towers, {.size = size});
    EXPECT_TRUE((*step)(data.x, y).allclose(whole, 1e-13));
    EXPECT_TRUE(towers.gradients().allclose(expected, 1e-11)) << size;
    EXPECT_TRUE(size < 10 || towers.gradients().equal(expected));  // one part: to the bit
  }
}

TEST_F(JointLossTest, OneEncoderOfSeveralTensorsAndOutputs) {
  const Towers towers;
  const at::Tensor y7 = y.narrow(0, 0, 7);
  towers.loss(towers.a(data.x), towers.b(y)).backward();
  const at::Tensor expected = towers.gradients().clone();
  towers.zero();
  Microbatches step(
      [&](const std::vector<at::Tensor>& rows) { return towers.loss(rows[0], rows[1]); },
      [&](const at::Tensor& a, const at::Tensor& b) {
        return std::vector<at::Tensor>{towers.a(a), towers.b(b)};
      },
      {.size = 4});
  step(data.x, y);
  EXPECT_TRUE(towers.gradients().allclose(expected, 1e-11));
  EXPECT_THROW(step(data.x, y7), c10::ValueError);
}

TEST_F(JointLossTest, TowersOfDifferentLengths) {
  const Towers towers;
  const at::Tensor y23 = at::rand({23, 4}, at::kDouble);
  towers.loss(towers.a(data.x), towers.b(y23)).backward();
  const at::Tensor expected = towers.gradients().clone();
  towers.zero();
  const auto step = step_of(towers, {.size = 4});
  (*step)(data.x, y23);
  EXPECT_TRUE(towers.gradients().allclose(expected, 1e-11));
}

TEST_F(JointLossTest, ExactAfterAFailureAnywhere) {
  install_cpu_allocator();
  const auto left = [&](std::int64_t size, std::int64_t at, std::int64_t& used,
                        std::int64_t& allocations) {
    at::manual_seed(7);
    const Towers own(0.3);
    own.scale.mutable_grad() = at::ones({}, at::kDouble);
    const auto step = step_of(own, {.size = size});
    at::manual_seed(8);
    at::Tensor loss;
    {
      const testing::OomInjector injector(at);
      loss = (*step)(data.x, y);
      allocations = injector.allocations();
    }
    used = step->size();
    return at::cat({own.gradients(), loss.reshape({1}), at::rand({1}, at::kDouble)});
  };
  std::int64_t used = 0;
  std::int64_t allocations = 0;
  std::int64_t ignored = 0;
  left(4, kNever, used, allocations);
  ASSERT_GT(allocations, 60);
  std::map<std::int64_t, at::Tensor> expected;  // by size
  for (std::int64_t at = 1; at <= allocations; at += 7) {
    const at::Tensor result = left(4, at, used, ignored);
    ASSERT_LT(used, 4) << at;
    if (!expected.contains(used)) {
      std::int64_t same = 0;
      expected[used] = left(used, kNever, same, ignored);
    }
    ASSERT_TRUE(result.equal(expected[used])) << at;
  }
}

TEST_F(JointLossTest, BuffersAreAsAfterOnePass) {
  const Towers towers;
  const at::Tensor calls = at::zeros({}, at::kDouble);
  const auto run = [&](std::int64_t size) {
    calls.zero_();
    towers.zero();
    Microbatches step([&](const at::Tensor& a) { return a.var(); },
                      [&](const at::Tensor& x) {
                        calls.add_(1);
                        return towers.a(x) * calls.item<double>();
                      },
                      {.size = size, .buffers = {calls}});
    step(data.x);
    return towers.first.gradients().clone();
  };
  const at::Tensor expected = run(10);
  EXPECT_TRUE(run(3).allclose(expected, 1e-11));
  EXPECT_EQ(calls.item<double>(), 1);
}

TEST_F(JointLossTest, WrongResultsAreErrors) {
  const Towers towers;
  const auto loss = [](const at::Tensor& rows) { return rows.var(); };
  const auto run = [&](const auto& of, const auto& encode) {
    Microbatches step(of, encode, {.size = 3});
    step(data.x);
  };
  EXPECT_THROW(run(loss, [&](const at::Tensor& x) { return towers.a(x).mean(0); }),
               c10::ValueError);
  EXPECT_THROW(run([](const at::Tensor& rows) { return rows; },
                   [&](const at::Tensor& x) { return towers.a(x); }),
               c10::ValueError);
  EXPECT_THROW(run(loss, [](const at::Tensor& x) { return x; }), c10::ValueError);
  EXPECT_FALSE(towers.first.weights[0].grad().defined());
}

TEST_F(JointLossTest, RanksHaveTheGradientsOfAllTheirBatches) {
  const Towers towers;
  const at::Tensor whole = towers.loss(towers.a(data.x), towers.b(y));
  whole.backward();
  const at::Tensor expected = towers.gradients().clone();
  for (const int fails_at : {0, 1, 2, 3, 4}) {  // parts of rank 1; 0: none
    ThreadRanks ranks(2);
    ThreadSum sums;
    std::vector<Towers> models(2);
    std::vector<at::Tensor> losses(2);
    std::vector<std::int64_t> sizes(2);
    std::vector<std::vector<Attempt>> attempts(2);
    const auto errors = ranks.run([&](std::int64_t rank) {
      const auto i = static_cast<std::size_t>(rank);
      models[i].copy_from(towers);
      Agreement agreement(std::make_shared<ThreadChannel>(ranks, rank));
      int parts = 0;
      Microbatches step(
          [&](const at::Tensor& a, const at::Tensor& b) { return models[i].loss(a, b); },
          std::tuple(
              [&](const at::Tensor& x) {
                if (rank == 1 && ++parts == fails_at) {
                  throw_out_of_memory();
                }
                return models[i].a(x);
              },
              [&](const at::Tensor& x) { return models[i].b(x); }),
          {.size = 2,
           .adapt = {.ranks = &agreement, .attempts = &attempts[i]},
           .parameters = models[i].parameters(),
           .sum_over_ranks = sums.of(rank)});
      const std::int64_t begin = rank == 0 ? 0 : 6;  // 6 items and 4
      const std::int64_t count = rank == 0 ? 6 : 4;
      losses[i] = step(data.x.narrow(0, begin, count), y.narrow(0, begin, count));
      sizes[i] = step.size();
    });
    for (std::size_t i = 0; i < 2; ++i) {
      if (errors[i]) {
        std::rethrow_exception(errors[i]);
      }
      EXPECT_EQ(sizes[i], fails_at == 0 ? 2 : 1) << fails_at;
      std::erase_if(attempts[i], [](const Attempt& each) { return !each.fitted(); });
      // Rank 0 stops where the outputs are put together if rank 1 failed in one of its two parts
      // before: no fit. What fails later fails after it.
      EXPECT_EQ(attempts[i].size(), i == 0 && fails_at > 2 ? 2U : 1U) << fails_at;
      EXPECT_TRUE(losses[i].allclose(whole));
      EXPECT_TRUE(models[i].gradients().allclose(expected, 1e-11)) << fails_at;
    }
    EXPECT_TRUE(models[0].gradients().equal(models[1].gradients()));
  }
}

}  // namespace
}  // namespace brim
