#include <ATen/ops/dropout.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>
#include <brim/adapt/adapt.h>
#include <brim/adapt/size_memory.h>
#include <gtest/gtest.h>

#include <memory>
#include <span>
#include <stdexcept>
#include <vector>

#include "adapt/calls.h"

namespace brim {
namespace {

using namespace tests;
using Values = std::vector<std::int64_t>;

Values copy(std::span<const std::int64_t> values) { return {values.begin(), values.end()}; }

TEST(Maximize, CallsWithTheMaximaFirst) {
  EXPECT_EQ(maximize({.parameters = {{.maximum = 8}, {.maximum = 3}}}, copy), (Values{8, 3}));
  EXPECT_EQ(maximize(8, [](std::int64_t size) { return size; }), 8);
}

TEST(Maximize, ReturnsVoidMoveOnlyAndTensorResults) {
  const ParameterSearchOptions search{.parameters = {{.maximum = 8}}};
  const auto fail_above = [](std::span<const std::int64_t> values, std::int64_t most) {
    if (values[0] > most) {
      throw_out_of_memory();
    }
  };
  int calls = 0;
  maximize(search, [&](std::span<const std::int64_t> values) {
    ++calls;
    fail_above(values, 4);
  });
  EXPECT_EQ(calls, 2);
  const auto moved = maximize(search, [&](std::span<const std::int64_t> values) {
    fail_above(values, 4);
    return std::make_unique<std::int64_t>(values[0]);
  });
  EXPECT_EQ(*moved, 4);
  const at::Tensor tensor = maximize(search, [&](std::span<const std::int64_t> values) {
    fail_above(values, 4);
    return at::zeros({values[0]});
  });
  EXPECT_EQ(tensor.size(0), 4);
}

TEST(Maximize, LowersOneParameterAfterTheOther) {
  std::vector<Values> tried;
  const auto product_up_to = [&](std::int64_t most) {
    return [&tried, most](std::span<const std::int64_t> values) {
      tried.push_back(copy(values));
      if (values[0] * values[1] > most) {
        throw_out_of_memory();
      }
      return copy(values);
    };
  };
  const ParameterSearchOptions search{.parameters = {{.maximum = 8}, {.maximum = 4}}};
  EXPECT_EQ(maximize(search, product_up_to(8), {.strategy = Strategy::halving}), (Values{2, 4}));
  EXPECT_EQ(tried, (std::vector<Values>{{8, 4}, {4, 4}, {2, 4}}));
  tried.clear();
  EXPECT_EQ(maximize(search, product_up_to(2), {.strategy = Strategy::halving}), (Values{1, 2}));
  EXPECT_EQ(tried, (std::vector<Values>{{8, 4}, {4, 4}, {2, 4}, {1, 4}, {1, 2}}));
}

TEST(Maximize, AGroupShrinksTogetherAndItsQuantaAreKept) {
  std::vector<Values> tried;
  const Values found =
      maximize({.parameters = {{.maximum = 1000, .quantum = 16}, {.maximum = 100}, {.maximum = 6}},
                .groups = {{0, 1}, {2}}},
               [&](std::span<const std::int64_t> values) {
                 tried.push_back(copy(values));
                 if (values[0] * values[1] > 2000) {
                   throw_out_of_memory();
                 }
                 return copy(values);
               });
  EXPECT_LE(found[0] * found[1], 2000);
  EXPECT_EQ(found[2], 6) << "the next group is not touched";
  for (std::size_t i = 1; i < tried.size(); ++i) {
    EXPECT_TRUE(tried[i][0] <= 16 || tried[i][0] % 16 == 0) << tried[i][0];
    EXPECT_LE(tried[i][0], tried[i - 1][0]);
    EXPECT_LE(tried[i][1], tried[i - 1][1]);
  }
}

TEST(Maximize, TwoParametersUnderABudgetComeCloseAndAreRemembered) {
  const auto work = [](std::span<const std::int64_t> values) {
    const at::Tensor constant = tensor_of(kMiB);
    const at::Tensor product = tensor_of(values[0] * values[1] * 1024);
  };
  const Budget budget = room_for(9 * kMiB);
  SizeMemory memory;
  const ParameterSearchOptions search{.parameters = {{.maximum = 3000}, {.maximum = 40}}};
  for (int call = 0; call < 3; ++call) {
    std::vector<Attempt> attempts;
    maximize(search, work, {.memory = &memory, .attempts = &attempts});
    EXPECT_LE(failures_of(attempts), call == 0 ? 3 : 1);
    EXPECT_EQ(attempts.back().values[1], 40);
    EXPECT_GE(attempts.back().values[0], 8 * 1024 / 40 * 97 / 100);
  }
}

TEST(Maximize, GivesUpWithAllParametersAtTheirFloor) {
  std::vector<Values> tried;
  const std::string message = message_of<c10::OutOfMemoryError>([&] {
    maximize({.parameters = {{.maximum = 8, .lower = 2}, {.maximum = 4}}},
             [&](std::span<const std::int64_t> values) {
               tried.push_back(copy(values));
               throw_out_of_memory();
             },
             {.name = "batch, heads"});
  });
  EXPECT_EQ(tried.back(), (Values{2, 1}));
  EXPECT_CONTAINS(message, "batch, heads = 2, 1, the smallest that is allowed");
  EXPECT_CONTAINS(message, "batch, heads = 8, 4: host memory");
}

TEST(Maximize, ResultDoesNotDependOnHowManyTriesItTook) {
  expect_same_result_wherever_it_fails([] {
    return maximize({.parameters = {{.maximum = 64}, {.maximum = 8}}},
                    [](std::span<const std::int64_t> values) {
                      const at::Tensor scratch = at::zeros({values[0], values[1]});
                      const at::Tensor x = at::dropout(at::rand({50}), 0.5, true);
                      return at::dropout(x.add(at::rand({50})), 0.3, true);
                    });
  });
}

TEST(Maximize, OtherErrorsPass) {
  EXPECT_THROW(maximize({.parameters = {{.maximum = 8}}},
                        [](std::span<const std::int64_t>) { throw std::domain_error("no"); }),
               std::domain_error);
}

TEST(Maximize, FactsOfAnotherNumberOfParametersAreOfNoUse) {
  SizeMemory memory;
  batch(8,
        [](std::int64_t size) {
          if (size > 2) {
            throw_out_of_memory();
          }
        },
        {.memory = &memory});
  EXPECT_EQ(maximize({.parameters = {{.maximum = 8}, {.maximum = 3}}}, copy, {.memory = &memory}),
            (Values{8, 3}));
}

TEST(Maximize, WrongArgumentsAreNamed) {
  const auto message = [](const ParameterSearchOptions& search) {
    return message_of<c10::ValueError>([&] { maximize(search, copy); });
  };
  EXPECT_CONTAINS(message({}), "parameters=[] is not allowed");
  EXPECT_CONTAINS(message({.parameters = {{.maximum = 4}, {.maximum = 0}}}),
                  "parameters[1].maximum=0 is not allowed");
  EXPECT_CONTAINS(message({.parameters = {{.maximum = 4, .quantum = 0}}}),
                  "parameters[0].quantum=0 is not allowed");
  EXPECT_CONTAINS(message({.parameters = {{.maximum = 4, .lower = 5}}}), "parameters[0].maximum=4");
  EXPECT_CONTAINS(message({.parameters = {{.maximum = 4}}, .groups = {{1}}}), "groups[0] holds 1");
  EXPECT_CONTAINS(message_of<c10::ValueError>([] { maximize(-1, [](std::int64_t) {}); }),
                  "must be 1 or more, got -1");
}

}  // namespace
}  // namespace brim
