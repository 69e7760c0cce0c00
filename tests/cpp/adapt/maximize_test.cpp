#include <ATen/ops/dropout.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>
#include <brim/adapt/adapt.h>
#include <brim/adapt/size_memory.h>
#include <gtest/gtest.h>

#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <vector>

#include "adapt/calls.h"

namespace brim {
namespace {

using namespace tests;
using Values = std::vector<std::int64_t>;

Values copy(const Sizes& sizes) { return {sizes.values().begin(), sizes.values().end()}; }

TEST(Maximize, CallsWithTheMaximaFirst) {
  EXPECT_EQ(maximize({{"a", 8}, {"b", 3}}, copy), (Values{8, 3}));
  EXPECT_EQ(maximize(8, [](std::int64_t size) { return size; }), 8);
}

TEST(Maximize, ReturnsVoidMoveOnlyAndTensorResults) {
  const NamedSizes wanted{{"n", 8}};
  const auto fail_above = [](std::int64_t size, std::int64_t most) {
    if (size > most) {
      throw_out_of_memory();
    }
  };
  int calls = 0;
  maximize(wanted, [&](const Sizes& sizes) {
    ++calls;
    fail_above(sizes["n"], 4);
  });
  EXPECT_EQ(calls, 2);
  const auto moved = maximize(wanted, [&](const Sizes& sizes) {
    fail_above(sizes["n"], 4);
    return std::make_unique<std::int64_t>(sizes["n"]);
  });
  EXPECT_EQ(*moved, 4);
  const at::Tensor tensor = maximize(wanted, [&](const Sizes& sizes) {
    fail_above(sizes["n"], 4);
    return at::zeros({sizes["n"]});
  });
  EXPECT_EQ(tensor.size(0), 4);
}

TEST(Maximize, SizesAreFoundByNameAndInferredFromALength) {
  const at::Tensor x = at::zeros({7, 2});
  const std::vector<int> y(5);
  const auto result = maximize(
      {{"rows", infer(x)}, {"columns", infer(y), 4}, {"empty", infer(std::vector<int>())}},
      [](const Sizes& sizes) { return Values{sizes["columns"], sizes["rows"], sizes["empty"]}; });
  EXPECT_EQ(result, (Values{5, 7, 1}));
  EXPECT_CONTAINS(message_of<c10::ValueError>([] {
                    maximize({{"a", 2}, {"b", 2}}, [](const Sizes& s) { return s["c"]; });
                  }),
                  "there is no size named c: there are a, b");
}

TEST(Maximize, LowersOneParameterAfterTheOther) {
  std::vector<Values> tried;
  const auto product_up_to = [&](std::int64_t most) {
    return [&tried, most](const Sizes& sizes) {
      tried.push_back(copy(sizes));
      if (sizes["a"] * sizes["b"] > most) {
        throw_out_of_memory();
      }
      return copy(sizes);
    };
  };
  const NamedSizes search{{"a", 8}, {"b", 4}};
  EXPECT_EQ(maximize(search, product_up_to(8), {.strategy = Strategy::halving}), (Values{2, 4}));
  EXPECT_EQ(tried, (std::vector<Values>{{8, 4}, {4, 4}, {2, 4}}));
  tried.clear();
  EXPECT_EQ(maximize(search, product_up_to(2), {.strategy = Strategy::halving}), (Values{1, 2}));
  EXPECT_EQ(tried, (std::vector<Values>{{8, 4}, {4, 4}, {2, 4}, {1, 4}, {1, 2}}));
}

TEST(Maximize, AGroupShrinksTogetherAndItsQuantaAreKept) {
  std::vector<Values> tried;
  const Values found =
      maximize({{{"rows", 1000, 16}, {"columns", 100}}, {"depth", 6}}, [&](const Sizes& sizes) {
        tried.push_back(copy(sizes));
        if (sizes["rows"] * sizes["columns"] > 2000) {
          throw_out_of_memory();
        }
        return copy(sizes);
      });
  EXPECT_LE(found[0] * found[1], 2000);
  EXPECT_EQ(found[2], 6) << "the next group is not touched";
  for (std::size_t i = 1; i < tried.size(); ++i) {
    EXPECT_TRUE(tried[i][0] <= 16 || tried[i][0] % 16 == 0) << tried[i][0];
    EXPECT_LE(tried[i][0], tried[i - 1][0]);
    EXPECT_LE(tried[i][1], tried[i - 1][1]);
  }
}

TEST(Maximize, TheQuantumOfTheOptionsIsForAllSizesWithoutTheirOwn) {
  std::vector<Values> tried;
  maximize({{"a", 100}, {"b", 100, 5}},
           [&](const Sizes& sizes) {
             tried.push_back(copy(sizes));
             if (sizes["a"] > 1 || sizes["b"] > 20) {
               throw_out_of_memory();
             }
           },
           {.strategy = Strategy::halving, .quantum = 8});
  EXPECT_EQ(tried[1], (Values{48, 100}));
  EXPECT_EQ(tried.back(), (Values{1, 10}));
}

TEST(Maximize, TwoParametersUnderABudgetComeCloseAndAreRemembered) {
  const auto work = [](const Sizes& sizes) {
    const at::Tensor constant = tensor_of(kMiB);
    const at::Tensor product = tensor_of(sizes["a"] * sizes["b"] * 1024);
  };
  const Budget budget = room_for(9 * kMiB);
  SizeMemory memory;
  const NamedSizes search{{"a", 3000}, {"b", 40}};
  for (int call = 0; call < 3; ++call) {
    std::vector<Attempt> attempts;
    maximize(search, work, {.memory = &memory, .attempts = &attempts});
    EXPECT_LE(failures_of(attempts), call == 0 ? 5 : 0);  // halving: 4
    EXPECT_EQ(attempts.back().values[1], 40);
    // 187 is what halving finds.
    EXPECT_GE(attempts.back().values[0],
              call == 0 ? 187 : 8 * 1024 / 40 * (call == 1 ? 90 : 97) / 100);
  }
}

TEST(Maximize, GivesUpWithAllParametersAtTheirFloor) {
  std::vector<Values> tried;
  const std::string message = message_of<c10::OutOfMemoryError>([&] {
    maximize({{"batch", 8}, {"heads", 4}},
             [&](const Sizes& sizes) {
               tried.push_back(copy(sizes));
               throw_out_of_memory();
             },
             {.lower = 2});
  });
  EXPECT_EQ(tried.back(), (Values{2, 2}));
  EXPECT_CONTAINS(message, "batch, heads = 2, 2, the smallest that is allowed");
  EXPECT_CONTAINS(message, "batch, heads = 8, 4: out of host memory");
}

TEST(Maximize, ResultDoesNotDependOnHowManyTriesItTook) {
  expect_same_result_wherever_it_fails([] {
    return maximize({{"a", 64}, {"b", 8}}, [](const Sizes& sizes) {
      const at::Tensor scratch = at::zeros({sizes["a"], sizes["b"]});
      const at::Tensor x = at::dropout(at::rand({50}), 0.5, true);
      return at::dropout(x.add(at::rand({50})), 0.3, true);
    });
  });
}

TEST(Maximize, OtherErrorsPass) {
  EXPECT_THROW(maximize({{"a", 8}}, [](const Sizes&) { throw std::domain_error("no"); }),
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
  EXPECT_EQ(maximize({{"a", 8}, {"b", 3}}, copy, {.memory = &memory}), (Values{8, 3}));
}

TEST(Maximize, WrongArgumentsAreNamed) {
  const auto message = [](std::initializer_list<SizeGroup> sizes) {
    return message_of<c10::ValueError>([&] { maximize(NamedSizes(sizes), copy); });
  };
  EXPECT_CONTAINS(message({}), "maximize needs at least one size");
  EXPECT_CONTAINS(message({{"a", 4}, {"a", 2}}), "the name a is there twice");
  EXPECT_CONTAINS(message({{"a", 4}, {"b", 0}}), "b must be 1 or more, got 0");
  EXPECT_CONTAINS(message({{"a", 4, -1}}), "the quantum of a must be 1 or more, got -1");
  EXPECT_CONTAINS(message_of<c10::ValueError>([] { maximize(-1, [](std::int64_t) {}); }),
                  "must be 1 or more, got -1");
}

}  // namespace
}  // namespace brim
