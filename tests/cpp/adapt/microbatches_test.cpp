#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <brim/adapt/detail/gradient_reduction.h>
#include <brim/adapt/detail/item_contrast.h>
#include <brim/adapt/microbatches.h>
#include <brim/adapt/whole_batch.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "adapt/calls.h"
#include "adapt/microbatches_cases.h"
#include "adapt/thread_ranks.h"

namespace brim {
namespace {

using namespace tests;

class MicrobatchesTest : public ::testing::Test {
 protected:
  MicrobatchesTest() { at::manual_seed(1); }

  at::Tensor squares(const at::Tensor& x, const at::Tensor& y) const {
    return (model(x) - y).square();
  }
  /// What one backward over everything leaves.
  at::Tensor expected(const at::Tensor& loss) {
    loss.backward();
    const at::Tensor gradients = model.gradients().clone();
    model.zero();
    return gradients;
  }

  /// One per rank.
  std::vector<Model> copies() const {
    std::vector<Model> models(2);
    for (Model& own : models) {
      for (std::size_t i = 0; i < own.weights.size(); ++i) {
        own.weights[i].set_data(model.weights[i].detach().clone());
      }
    }
    return models;
  }

  Model model;
  Data data;
};

TEST_F(MicrobatchesTest, MeanOverUnevenParts) {
  const at::Tensor whole = squares(data.x, data.y).mean();
  const at::Tensor gradients = expected(whole);
  for (const std::int64_t size : {1, 3, 9, 10, 50}) {
    Microbatches step(
        [&](const at::Tensor& x, const at::Tensor& y) { return squares(x, y).mean(); },
        {.size = size});
    EXPECT_TRUE(step(data.x, data.y).allclose(whole));
    EXPECT_TRUE(model.gradients().allclose(gradients, 1e-12)) << size;
    EXPECT_EQ(step.size(), std::min<std::int64_t>(size, 10));
    model.zero();
  }
}

TEST_F(MicrobatchesTest, SumOverParts) {
  const at::Tensor whole = squares(data.x, data.y).sum();
  const at::Tensor gradients = expected(whole);
  Microbatches step([&](const at::Tensor& x, const at::Tensor& y) { return squares(x, y).sum(); },
                    {.reduction = Reduction::sum, .size = 3});
  EXPECT_TRUE(step(data.x, data.y).allclose(whole));
  EXPECT_TRUE(model.gradients().allclose(gradients, 1e-12));
}

TEST_F(MicrobatchesTest, PartsThatCountForThemselvesOneOfThemNothing) {
  at::Tensor counts = at::ones({10}, at::kDouble);
  counts.narrow(0, 0, 4).zero_();  // the first part counts nothing
  counts.narrow(0, 5, 2).zero_();
  const at::Tensor whole = (squares(data.x, data.y) * counts).sum() / counts.sum();
  const at::Tensor gradients = expected(whole);
  Microbatches step(
      [&](std::int64_t begin, std::int64_t end) {
        const auto part = [&](const at::Tensor& t) { return t.narrow(0, begin, end - begin); };
        const at::Tensor sum = (squares(part(data.x), part(data.y)) * part(counts)).sum();
        return PartLoss(sum / part(counts).sum(), part(counts).sum().item<double>());
      },
      {.size = 3});
  EXPECT_TRUE(step(10).allclose(whole));
  EXPECT_TRUE(model.gradients().allclose(gradients, 1e-12));
}

TEST_F(MicrobatchesTest, ASumCountsWhatItIsDividedBy) {
  const at::Tensor mask = at::tensor({1, 1, 0, 1, 0, 0, 1, 1, 1, 0}, at::kDouble);
  const auto loss = [&](std::int64_t begin, std::int64_t end) {
    const auto part = [&](const at::Tensor& t) { return t.narrow(0, begin, end - begin); };
    return (squares(part(data.x), part(data.y)) * part(mask)).sum() / part(mask).sum();
  };
  const at::Tensor whole = loss(0, 10);
  const at::Tensor gradients = expected(whole);
  Microbatches step(loss, {.size = 4});
  EXPECT_TRUE(step(10).allclose(whole, 1e-12));
  EXPECT_TRUE(model.gradients().allclose(gradients, 1e-12));
}

/// Labels that are ignored and weights of classes; the first part has no label.
struct Labels {
  at::Tensor of = at::arange(10).remainder(3);
  at::Tensor weight = at::tensor({1.0, 9.0, 20.0}, at::kDouble);

  Labels() {
    of.narrow(0, 0, 4).fill_(-100);
    of.narrow(0, 7, 1).fill_(-100);
  }
};

TEST_F(MicrobatchesTest, ACrossEntropyCountsItsLabelsAndTheirWeights) {
  const Labels labels;
  const at::Tensor head = Model::weight({3, 1});
  for (const bool weighted : {false, true}) {
    const auto loss = [&](const at::Tensor& x, const at::Tensor& y) {
      const at::Tensor logits = at::linear(model(x).unsqueeze(1), head);
      return at::cross_entropy_loss(
          logits, y, weighted ? std::optional<at::Tensor>(labels.weight) : std::nullopt);
    };
    const at::Tensor whole = loss(data.x, labels.of);
    const at::Tensor gradients = expected(whole);
    for (const std::int64_t size : {1, 2, 4}) {
      Microbatches step(loss, {.size = size});
      EXPECT_TRUE(step(data.x, labels.of).allclose(whole, 1e-12));
      EXPECT_TRUE(model.gradients().allclose(gradients, 1e-12)) << size;
      model.zero();
    }
  }
}

TEST_F(MicrobatchesTest, ALossThatHasNoPartsIsRefused) {
  const auto refusal = [&](const auto& loss, Reduction reduction) -> std::string {
    Microbatches step(loss, {.reduction = reduction, .size = 4});
    try {
      step(data.x, data.y);
    } catch (const c10::ValueError& error) {
      EXPECT_FALSE(model.weights[0].grad().defined());
      return error.what_without_backtrace();
    }
    model.zero();
    return "";
  };
  const auto root = [&](const at::Tensor& x, const at::Tensor& y) {
    return squares(x, y).mean().sqrt();
  };
  const auto sum = [&](const at::Tensor& x, const at::Tensor& y) { return squares(x, y).sum(); };
  const auto mean = [&](const at::Tensor& x, const at::Tensor& y) { return squares(x, y).mean(); };
  const auto decay = [&](const at::Tensor& x, const at::Tensor& y) {
    return squares(x, y).sum() + model.weights[0].square().sum();
  };
  const auto root_in_backward = [&](const at::Tensor& x, const at::Tensor& y) {
    const at::Tensor value = mean(x, y);
    return value.detach() + value.sqrt() - value.sqrt().detach();
  };
  const auto root_of_two_or_more = [&](const at::Tensor& x, const at::Tensor& y) {
    TORCH_CHECK(x.size(0) > 1, "one item has no neighbour");
    return root(x, y);
  };
  EXPECT_NE(refusal(root, Reduction::mean).find("does not follow"), std::string::npos);
  EXPECT_NE(refusal(root_in_backward, Reduction::mean).find("does not follow"), std::string::npos);
  EXPECT_NE(refusal(root_of_two_or_more, Reduction::mean).find("does not follow"),
            std::string::npos);
  EXPECT_NE(refusal(decay, Reduction::sum).find("does not follow"), std::string::npos);
  EXPECT_NE(refusal(sum, Reduction::mean).find("returns a sum"), std::string::npos);
  EXPECT_NE(refusal(mean, Reduction::sum).find("returns a mean"), std::string::npos);
  EXPECT_EQ(refusal(mean, Reduction::mean), "");
  EXPECT_EQ(refusal(sum, Reduction::sum), "");
  model.dropout = 0.5;
  EXPECT_EQ(refusal(mean, Reduction::mean), "");
  EXPECT_EQ(refusal(sum, Reduction::sum), "");
}

TEST_F(MicrobatchesTest, AccumulatedBatchesAreMeansOverAllOfThem) {
  const Labels labels;
  const at::Tensor head = Model::weight({3, 1});
  const auto loss = [&](const at::Tensor& x, const at::Tensor& y) {
    return at::cross_entropy_loss(at::linear(model(x).unsqueeze(1), head), y);
  };
  const at::Tensor whole = loss(data.x, labels.of);
  const at::Tensor gradients = expected(whole);
  const at::Tensor before = at::ones({8, 4}, at::kDouble);
  model.weights[0].mutable_grad() = before;
  std::vector<std::tuple<at::Tensor, at::Tensor>> batches;
  for (const auto& [begin, end] : {std::pair{0, 3}, {3, 8}, {8, 10}}) {
    batches.emplace_back(data.x.narrow(0, begin, end - begin),
                         labels.of.narrow(0, begin, end - begin));
  }
  Microbatches step(loss, {.size = 2});
  EXPECT_TRUE(step.accumulate(batches).allclose(whole, 1e-12));
  EXPECT_TRUE(model.weights[0].grad().is_same(before));
  before.sub_(1);
  EXPECT_TRUE(model.gradients().allclose(gradients, 1e-10));
  batches.emplace_back(data.x, labels.of.narrow(0, 0, 1));
  before.fill_(1);
  EXPECT_THROW(step.accumulate(batches), c10::ValueError);
  EXPECT_TRUE(model.weights[0].grad().is_same(before));
  EXPECT_TRUE(before.equal(at::ones({8, 4}, at::kDouble)));
}

TEST_F(MicrobatchesTest, RanksCountTheirLabels) {
  const Labels labels;
  const at::Tensor head = Model::weight({3, 1}).detach();
  const auto loss_of = [&](const Model& own, const at::Tensor& x, const at::Tensor& y) {
    return at::cross_entropy_loss(at::linear(own(x).unsqueeze(1), head), y);
  };
  const at::Tensor whole = loss_of(model, data.x, labels.of);
  const at::Tensor gradients = expected(whole);
  ThreadRanks ranks(2);
  ThreadSum sums;
  const std::vector<Model> models = copies();
  std::vector<at::Tensor> losses(2);
  const auto errors = ranks.run([&](std::int64_t rank) {
    const auto i = static_cast<std::size_t>(rank);
    Agreement agreement(std::make_shared<ThreadChannel>(ranks, rank));
    Microbatches step(
        [&](const at::Tensor& x, const at::Tensor& y) { return loss_of(models[i], x, y); },
        {.size = rank == 0 ? 2 : 0,
         .adapt = {.ranks = &agreement},
         .parameters = models[i].weights,
         .sum_over_ranks = sums.of(rank)});
    const std::int64_t begin = rank == 0 ? 0 : 6;  // 2 labels and 3
    const std::int64_t count = rank == 0 ? 6 : 4;
    losses[i] = step(data.x.narrow(0, begin, count), labels.of.narrow(0, begin, count));
  });
  for (std::size_t i = 0; i < 2; ++i) {
    if (errors[i]) {
      std::rethrow_exception(errors[i]);
    }
    EXPECT_TRUE(losses[i].allclose(whole));
    EXPECT_TRUE(models[i].gradients().allclose(gradients, 1e-12));
  }
}

TEST_F(MicrobatchesTest, GradientsThatWereThereKeepTheirTensorAndAreAddedTo) {
  const at::Tensor gradients = expected(squares(data.x, data.y).mean());
  const at::Tensor before = at::ones({8, 4}, at::kDouble);
  model.weights[0].mutable_grad() = before;
  Microbatches step([&](const at::Tensor& x, const at::Tensor& y) { return squares(x, y).mean(); },
                    {.size = 4});
  step(data.x, data.y);
  EXPECT_TRUE(model.weights[0].grad().is_same(before));
  EXPECT_TRUE((before - 1).flatten().allclose(gradients.narrow(0, 0, 32), 1e-12));
  EXPECT_FALSE(model.weights[1].grad().defined());
}

TEST_F(MicrobatchesTest, AnotherErrorLeavesTheGradientsAsTheyWere) {
  const at::Tensor before = at::ones({8, 4}, at::kDouble);
  model.weights[0].mutable_grad() = before;
  int parts = 0;
  Microbatches step(
      [&](const at::Tensor& x, const at::Tensor& y) {
        TORCH_CHECK_VALUE(++parts < 3, "not this one");
        return squares(x, y).mean();
      },
      {.size = 4, .check = false});
  EXPECT_THROW(step(data.x, data.y), c10::ValueError);
  EXPECT_TRUE(model.weights[0].grad().is_same(before));
  EXPECT_TRUE(before.equal(at::ones({8, 4}, at::kDouble)));
  EXPECT_FALSE(model.weights[2].grad().defined());
}

/// What a step leaves that fails at each allocation in turn is what a step leaves that has the
/// smaller size from the start: random numbers, too.
TEST_F(MicrobatchesTest, ExactAfterAFailureAnywhere) {
  install_cpu_allocator();
  for (const bool accumulates : {false, true}) {
    const auto gradients_of = [&](std::int64_t size, std::int64_t at, std::int64_t& used,
                                  std::int64_t& allocations) {
      at::manual_seed(7);
      const Model own(0.3);
      if (accumulates) {
        own.weights[0].mutable_grad() = at::ones({8, 4}, at::kDouble);
      }
      Microbatches step(
          [&](const at::Tensor& x, const at::Tensor& y) { return (own(x) - y).square().mean(); },
          {.size = size, .check = accumulates});
      at::manual_seed(8);
      at::Tensor loss;
      {
        const testing::OomInjector injector(at);
        loss = step(data.x, data.y);
        allocations = injector.allocations();
      }
      used = step.size();
      return at::cat({own.gradients(), loss.reshape({1})});
    };
    std::int64_t used = 0;
    std::int64_t allocations = 0;
    std::int64_t ignored = 0;
    gradients_of(4, kNever, used, allocations);
    ASSERT_GT(allocations, 20);
    for (std::int64_t at = 1; at <= allocations; ++at) {
      const at::Tensor result = gradients_of(4, at, used, ignored);
      ASSERT_LT(used, 4) << at;
      std::int64_t same = 0;
      ASSERT_TRUE(result.equal(gradients_of(used, kNever, same, ignored))) << at;
    }
  }
}

TEST_F(MicrobatchesTest, TheSizeIsRememberedForBatchesOfAnotherLength) {
  install_cpu_allocator();
  const at::Tensor w = at::ones({1}, at::kFloat).requires_grad_(true);
  Microbatches step([&](const at::Tensor& x) {
    const at::Tensor held = tensor_of(x.size(0) * 1024);
    return (x * w).mean();
  });
  const auto budget = room_for(600 << 10);
  step(at::ones({1000}));
  EXPECT_LT(step.size(), 600);
  EXPECT_GT(step.size(), 250);
  std::int64_t allocations = 0;
  {
    const testing::OomInjector counter(kNever);
    step(at::ones({900}));
    allocations = counter.failures();
  }
  EXPECT_EQ(allocations, 0);
  EXPECT_LT(step.size(), 600);
}

TEST_F(MicrobatchesTest, WrongInputIsAnErrorThatSaysWhat) {
  const auto loss = [&](const at::Tensor& x, const at::Tensor& y) { return squares(x, y); };
  const auto message = [](const auto& work) -> std::string {
    try {
      work();
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "";
  };
  EXPECT_NE(message([&] { Microbatches{loss}(data.x, data.y); }).find("one element"),
            std::string::npos);
  EXPECT_NE(
      message([&] { Microbatches{loss}(data.x, data.y.narrow(0, 0, 3)); }).find("same length"),
      std::string::npos);
  EXPECT_NE(message([&] { Microbatches{loss, {.size = -1}}; }).find("size must be"),
            std::string::npos);
  EXPECT_NE(message([&] {
              Microbatches{[&](const at::Tensor& x) { return x.sum(); }}(data.x);
            }).find("gradient"),
            std::string::npos);
  EXPECT_NE(message([&] {
              const auto calls_backward = [&](const at::Tensor& x, const at::Tensor& y) {
                at::Tensor result = squares(x, y).mean();
                result.backward({}, /*retain_graph=*/true);
                return result;
              };
              Microbatches{calls_backward, {.parameters = model.weights}}(data.x, data.y);
            }).find("called backward itself"),
            std::string::npos);
  EXPECT_NE(message([&] {
              Microbatches{[&](const at::Tensor& x, const at::Tensor& y) {
                return PartLoss(squares(x, y).mean(), -1);
              }}(data.x, data.y);
            }).find("0 or more"),
            std::string::npos);
  EXPECT_NE(
      message([&] {
        Microbatches{[&](std::int64_t, std::int64_t) { return squares(data.x, data.y).mean(); }}(0);
      }).find("1 item"),
      std::string::npos);
}

/// Two ranks, of which the second runs out of memory in its second part: both repeat, and have the
/// gradients of both batches.
TEST_F(MicrobatchesTest, RanksHaveTheGradientsOfAllTheirBatches) {
  const at::Tensor gradients = expected(squares(data.x, data.y).mean());
  const at::Tensor whole = squares(data.x, data.y).mean().detach();
  ThreadRanks ranks(2);
  ThreadSum sums;
  const std::vector<Model> models = copies();
  std::vector<at::Tensor> losses(2);
  std::vector<std::int64_t> sizes(2);
  const auto errors = ranks.run([&](std::int64_t rank) {
    const auto i = static_cast<std::size_t>(rank);
    const auto channel = std::make_shared<ThreadChannel>(ranks, rank);
    Agreement agreement(channel);
    int parts = 0;
    Microbatches step(
        [&](const at::Tensor& x, const at::Tensor& y) {
          if (rank == 1 && ++parts == 2) {
            throw_out_of_memory();
          }
          return (models[i](x) - y).square().mean();
        },
        {.size = 2,
         .adapt = {.ranks = &agreement},
         .parameters = models[i].weights,
         .sum_over_ranks = sums.of(rank)});
    const std::int64_t begin = rank == 0 ? 0 : 6;  // 6 items and 4
    const std::int64_t count = rank == 0 ? 6 : 4;
    losses[i] = step(data.x.narrow(0, begin, count), data.y.narrow(0, begin, count));
    sizes[i] = step.size();
  });
  for (std::size_t i = 0; i < 2; ++i) {
    if (errors[i]) {
      std::rethrow_exception(errors[i]);
    }
    EXPECT_EQ(sizes[i], 1);
    EXPECT_TRUE(losses[i].allclose(whole));
    EXPECT_TRUE(models[i].gradients().allclose(gradients, 1e-12));
  }
  EXPECT_TRUE(models[0].gradients().equal(models[1].gradients()));
}

TEST_F(MicrobatchesTest, AStepInsideOfAnotherIsRefusedAndLeavesItsSumsToTheOuterOne) {
  const at::Tensor gradients = expected(squares(data.x, data.y).mean());
  const at::Tensor whole = squares(data.x, data.y).mean().detach();
  ThreadRanks ranks(2);
  ThreadSum sums;
  const std::vector<Model> models = copies();
  std::vector<at::Tensor> losses(2);
  const auto errors = ranks.run([&](std::int64_t rank) {
    const auto i = static_cast<std::size_t>(rank);
    Agreement agreement(std::make_shared<ThreadChannel>(ranks, rank));
    const MicrobatchOptions options{.size = 2,
                                    .adapt = {.ranks = &agreement},
                                    .parameters = models[i].weights,
                                    .sum_over_ranks = sums.of(rank)};
    const auto loss_of = [&](const at::Tensor& x, const at::Tensor& y) {
      return (models[i](x) - y).square().mean();
    };
    Microbatches inner(loss_of, options);
    Microbatches step(
        [&](const at::Tensor& x, const at::Tensor& y) {
          EXPECT_THROW(inner(x, y), c10::Error);
          EXPECT_THROW(inner(x.narrow(0, 0, 0), y.narrow(0, 0, 0)), c10::Error);
          return loss_of(x, y);
        },
        options);
    const std::int64_t begin = 5 * rank;
    losses[i] = step(data.x.narrow(0, begin, 5), data.y.narrow(0, begin, 5));
  });
  for (std::size_t i = 0; i < 2; ++i) {
    if (errors[i]) {
      std::rethrow_exception(errors[i]);
    }
    EXPECT_TRUE(losses[i].allclose(whole));
    EXPECT_TRUE(models[i].gradients().allclose(gradients, 1e-12));
  }
}

TEST_F(MicrobatchesTest, AWrongBatchOnOneRankIsAnErrorOnAll) {
  ThreadRanks ranks(2);
  const auto errors = ranks.run([&](std::int64_t rank) {
    Agreement agreement(std::make_shared<ThreadChannel>(ranks, rank));
    Microbatches step(
        [&](const at::Tensor& x, const at::Tensor& y) { return squares(x, y).mean(); },
        {.size = 2,
         .adapt = {.ranks = &agreement},
         .parameters = model.weights,
         .sum_over_ranks = [](const at::Tensor& /*tensor*/) {}});
    if (rank == 0) {
      step(data.x, data.y.narrow(0, 0, 1));
    } else {
      EXPECT_THROW(step(data.x, data.y), RankError);
    }
  });
  EXPECT_TRUE(errors[0]);
  EXPECT_FALSE(errors[1]);
}

TEST_F(MicrobatchesTest, SettledRanksMakeNoExchangeAndRepairAFailureInTheSameCall) {
  const at::Tensor gradients = expected(squares(data.x, data.y).mean());
  ThreadRanks ranks(2);
  ThreadSum sums;
  const std::vector<Model> models = copies();
  std::vector<std::vector<std::int64_t>> sizes(2);
  std::vector<std::vector<int>> exchanges(2);
  const auto errors = ranks.run([&](std::int64_t rank) {
    const auto i = static_cast<std::size_t>(rank);
    const auto channel = std::make_shared<ThreadChannel>(ranks, rank);
    Agreement agreement(channel, {.sync = Sync::settled});
    int call = 0;
    Microbatches step(
        [&](const at::Tensor& x, const at::Tensor& y) {
          if (rank == 1 && call == 20 && x.size(0) > 2) {
            throw_out_of_memory();
          }
          return (models[i](x) - y).square().mean();
        },
        {.adapt = {.ranks = &agreement},
         .parameters = models[i].weights,
         .sum_over_ranks = sums.of(rank)});
    const std::int64_t begin = rank == 0 ? 0 : 6;  // 6 items and 4
    const std::int64_t count = rank == 0 ? 6 : 4;
    for (call = 0; call < 21; ++call) {
      models[i].zero();
      step(data.x.narrow(0, begin, count), data.y.narrow(0, begin, count));
      EXPECT_TRUE(models[i].gradients().allclose(gradients, 1e-12)) << "call " << call;
      sizes[i].push_back(step.size());
      exchanges[i].push_back(channel->exchanges());
    }
  });
  for (std::size_t i = 0; i < 2; ++i) {
    if (errors[i]) {
      std::rethrow_exception(errors[i]);
    }
    EXPECT_EQ(sizes[i][19], i == 0 ? 6 : 4);
    EXPECT_EQ(sizes[i][20], 2);
    EXPECT_EQ(exchanges[i][3], 5);  // two in the first call
    EXPECT_EQ(exchanges[i][19], 5);
  }
  EXPECT_TRUE(models[0].gradients().equal(models[1].gradients()));
}

TEST(GradientReduction, SmallGradientsOfOneTypeTravelTogether) {
  const auto parameter = [](std::int64_t numel, at::ScalarType type) {
    at::Tensor made = at::zeros({numel}, type).requires_grad_(true);
    made.mutable_grad() = at::ones({numel}, type);
    return made;
  };
  constexpr std::int64_t kLarge = std::int64_t{8} << 20;  // elements: more than a bucket
  constexpr std::int64_t kHalf = std::int64_t{4} << 20;   // two of them are more than a bucket
  const std::vector<at::Tensor> parameters{
      parameter(2, at::kFloat),  parameter(3, at::kFloat),     parameter(4, at::kDouble),
      parameter(5, at::kDouble), parameter(6, at::kFloat),     parameter(kLarge, at::kFloat),
      parameter(7, at::kFloat),  parameter(kHalf, at::kFloat), parameter(kHalf, at::kFloat)};
  detail::GradientReduction reduction(Reduction::mean, parameters);
  reduction.prepare(at::ones({}, at::kDouble), 1);
  std::vector<std::int64_t> summed;
  const auto sum = [&](const at::Tensor& tensor) { summed.push_back(tensor.numel()); };
  ASSERT_TRUE(reduction.vote(true, sum));
  summed.clear();
  reduction.run(sum);
  EXPECT_EQ(summed, (std::vector<std::int64_t>{5, 9, 6, kLarge, 7 + kHalf, kHalf}));
}

TEST(GradientReduction, RanksThatCountDifferentThingsAreAnErrorOnAll) {
  for (const Reduction reduction : {Reduction::mean, Reduction::sum}) {
    ThreadRanks ranks(2);
    ThreadSum sums;
    const auto errors = ranks.run([&](std::int64_t rank) {
      at::Tensor parameter = at::zeros({2}, at::kDouble).requires_grad_(true);
      parameter.mutable_grad() = at::ones({2}, at::kDouble);
      detail::GradientReduction own(reduction, {parameter});
      own.prepare(at::ones({}, at::kDouble), 1, rank == 0 ? 1.0 : 2.0);
      own.run(sums.of(rank));
    });
    for (const std::exception_ptr& error : errors) {
      ASSERT_EQ(error != nullptr, reduction == Reduction::mean);
      if (error) {
        EXPECT_THROW(std::rethrow_exception(error), c10::ValueError);
      }
    }
  }
}

/// What a sum adds: the other rank's numbers, which are whether it failed, its count, count · loss,
/// 1, shape and shape², and whether each parameter has a gradient.
auto with_other(std::vector<double> numbers) {
  return [numbers = std::move(numbers)](const at::Tensor& tensor) {
    tensor.add_(at::tensor(numbers, at::kDouble));
  };
}

TEST(GradientReduction, VotesUntilAllRanksAreReady) {
  at::Tensor weight = at::ones({3}, at::kDouble).requires_grad_(true);
  weight.mutable_grad() = at::full({3}, 6.0, at::kDouble);
  detail::GradientReduction reduction(Reduction::mean, {weight});
  EXPECT_FALSE(reduction.is_planned());
  reduction.prepare(at::scalar_tensor(2.0, at::kDouble), 4);
  EXPECT_TRUE(reduction.is_planned());
  EXPECT_FALSE(reduction.vote(true, with_other({1, 0, 0, 0, 0, 0, 0})));
  EXPECT_THROW(reduction.run(with_other({1, 0, 0, 0, 0, 0, 0})), RankError);
  EXPECT_TRUE(weight.grad().equal(at::full({3}, 6.0, at::kDouble)));
  EXPECT_FALSE(reduction.vote(false, with_other({0, 2, 16, 1, 0, 0, 1})));
  EXPECT_TRUE(reduction.vote(true, with_other({0, 2, 16, 1, 0, 0, 1})));
  reduction.run([](const at::Tensor& tensor) { tensor.add_(1); });  // weighted already
  EXPECT_DOUBLE_EQ(reduction.loss().item<double>(), (4 * 2 + 16) / 6.0);
  EXPECT_TRUE(weight.grad().allclose(at::full({3}, 6.0 * 4 / 6 + 1, at::kDouble)));
  weight.requires_grad_(false);
  EXPECT_FALSE(reduction.is_planned());
}

using Places = std::vector<std::int64_t>;

TEST(ItemContrast, FindsNeighboursThatDifferUntilTheyWereCompared) {
  detail::ItemContrast contrast;
  const std::vector<at::Tensor> batch{at::tensor({1.0, 1.0, 1.0, 5.0, 5.0})};
  EXPECT_EQ(contrast.pairs(batch, 0), (Places{2}));
  EXPECT_EQ(contrast.pairs(batch, 0), (Places{2})) << "not compared yet";
  contrast.compared();
  EXPECT_TRUE(contrast.pairs(batch, 0).empty()) << "nothing new";
}

TEST(ItemContrast, MoreThanTwiceOfWhatWasComparedIsNew) {
  detail::ItemContrast contrast;
  EXPECT_EQ(contrast.pairs({{4, 4, 5}}), (Places{1}));  // a fifth
  contrast.compared();
  EXPECT_TRUE(contrast.pairs({{4, 6, 6}}).empty()) << "a third";
  EXPECT_TRUE(contrast.pairs({{3, 5, 5}}).empty()) << "two fifths";
  EXPECT_EQ(contrast.pairs({{4, 8, 8}}), (Places{0})) << "a half";
}

TEST(ItemContrast, TakesAtMostThreePairsAndEachOnce) {
  detail::ItemContrast contrast;
  EXPECT_EQ(
      contrast.pairs(
          {{1, 2, 2, 2, 2}, {1, 3, 3, 3, 3}, {1, 1, 2, 2, 2}, {1, 1, 1, 2, 2}, {1, 1, 1, 1, 2}}),
      (Places{0, 1, 2}));
}

TEST(ItemContrast, CountsLabelsAndPadding) {
  // The sums of values are equal: labels that are not -100, and values that are not 0, differ.
  const at::Tensor padded = at::tensor({4, 0, 2, 2, 2, 2}, at::kLong).view({3, 2});
  EXPECT_EQ(detail::ItemContrast().pairs(std::vector<at::Tensor>{padded}, 0), (Places{0}));
  const at::Tensor labels = at::tensor({-50, -50, -50, -50, -100, 0}, at::kLong).view({3, 2});
  EXPECT_EQ(detail::ItemContrast().pairs(std::vector<at::Tensor>{labels}, 0), (Places{1}));
  EXPECT_EQ(detail::ItemContrast().pairs(std::vector<at::Tensor>{labels.t()}, 1), (Places{1}));
}

TEST(ItemContrast, LeavesOutWhatCannotBeMeasured) {
  const std::vector<at::Tensor> batch{at::Tensor(),
                                      at::tensor({1.0, 2.0}).to(at::kComplexDouble),
                                      at::tensor({1.0, 2.0}).to(at::kMeta),
                                      at::tensor({1.0, 2.0}).to_sparse(),
                                      at::tensor({1.0}),
                                      at::tensor(3.0).squeeze(),
                                      at::tensor({7.0, 7.0, 8.0})};
  EXPECT_EQ(detail::ItemContrast().pairs(batch, 0), (Places{1}));
  EXPECT_TRUE(detail::ItemContrast().pairs(batch, 1).empty());
}

TEST(WholeBatch, BatchNormInTrainingIsRefused) {
  torch::nn::Sequential model(torch::nn::Linear(2, 2), torch::nn::BatchNorm1d(2));
  try {
    refuse_whole_batch(*model);
    FAIL();
  } catch (const c10::ValueError& error) {
    EXPECT_NE(std::string(error.what_without_backtrace()).find("1 normalises"), std::string::npos);
  }
  model->eval();
  refuse_whole_batch(*model);
}

}  // namespace
}  // namespace brim
