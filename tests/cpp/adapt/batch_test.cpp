#include <ATen/ops/dropout.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros.h>
#include <brim/adapt/adapt.h>
#include <brim/adapt/size_memory.h>
#include <brim/memory/host_memory.h>
#include <gtest/gtest.h>

#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "adapt/calls.h"

namespace brim {
namespace {

using namespace tests;
using Sizes = std::vector<std::int64_t>;

/// Fails above `most`, without using any memory.
auto up_to(std::int64_t most, Sizes* tried = nullptr) {
  return [=](std::int64_t size) {
    if (tried != nullptr) {
      tried->push_back(size);
    }
    if (size > most) {
      throw_out_of_memory();
    }
    return size;
  };
}

// ---------------------------------------------------------------- results and errors

TEST(Batch, ReturnsWhatTheFunctionReturns) {
  EXPECT_EQ(batch(8, [](std::int64_t size) { return 2 * size; }), 16);
  EXPECT_EQ(batch(8, up_to(3), {.strategy = Strategy::halving}), 2);
  const at::Tensor tensor = batch(8, [](std::int64_t size) { return at::ones({size}); });
  EXPECT_EQ(tensor.size(0), 8);
  bool called = false;
  batch(8, [&](std::int64_t) { called = true; });
  EXPECT_TRUE(called);
  static_assert(std::is_void_v<decltype(batch(8, [](std::int64_t) {}))>);
}

TEST(Batch, MoveOnlyResultsComeFromARetryToo) {
  const auto make = [](std::int64_t size) {
    if (size > 4) {
      throw_out_of_memory();
    }
    return std::make_unique<std::int64_t>(size);
  };
  EXPECT_EQ(*batch(4, make), 4);
  EXPECT_LE(*batch(9, make), 4);
  std::vector<Attempt> attempts;
  EXPECT_LE(*batch(9, make, {.attempts = &attempts}), 4);
}

TEST(Batch, VoidFunctionIsRepeatedUntilItFits) {
  Sizes tried;
  batch(16, [&](std::int64_t size) { up_to(5, &tried)(size); }, {.strategy = Strategy::halving});
  EXPECT_EQ(tried, (Sizes{16, 8, 4}));
}

struct Foreign {
  int code;
};

TEST(Batch, AnErrorThatIsNotAboutMemoryIsTheSameObject) {
  std::vector<Attempt> attempts;
  for (const bool watched : {false, true}) {
    const void* thrown = nullptr;
    int calls = 0;
    try {
      batch(8,
            [&](std::int64_t) {
              ++calls;
              const auto error = std::make_exception_ptr(std::domain_error("not yours"));
              try {
                std::rethrow_exception(error);
              } catch (const std::domain_error& it) {
                thrown = &it;
              }
              std::rethrow_exception(error);
            },
            {.attempts = watched ? &attempts : nullptr});
      ADD_FAILURE() << "no error";
    } catch (const std::domain_error& error) {
      EXPECT_EQ(&error, thrown);
    }
    EXPECT_EQ(calls, 1);
  }
  EXPECT_THROW(batch(8, [](std::int64_t) { throw Foreign{3}; }), Foreign);
  EXPECT_THROW(batch(8, [](std::int64_t) { TORCH_CHECK_VALUE(false, "CPU out of memory."); }),
               c10::ValueError);
  EXPECT_THROW(batch(8, [](std::int64_t) { TORCH_CHECK(false, "shape mismatch"); }), c10::Error);
}

TEST(Batch, AnErrorAfterAFailurePassesToo) {
  EXPECT_THROW(batch(8,
                     [](std::int64_t size) {
                       if (size == 8) {
                         throw_out_of_memory();
                       }
                       throw Foreign{1};
                     }),
               Foreign);
}

TEST(Batch, WrongArgumentsAreNamed) {
  const auto identity = [](std::int64_t size) { return size; };
  for (const std::int64_t wrong : {0, -5}) {
    const std::string got = ", got " + std::to_string(wrong);
    EXPECT_CONTAINS(message_of<c10::ValueError>([&] { batch(wrong, identity); }),
                    "initial must be 1 or more" + got);
    // Also where nothing fails: a wrong argument is an error at once.
    EXPECT_CONTAINS(message_of<c10::ValueError>([&] { batch(8, identity, {.lower = wrong}); }),
                    "lower must be 1 or more" + got);
    EXPECT_CONTAINS(message_of<c10::ValueError>([&] { batch(8, identity, {.quantum = wrong}); }),
                    "quantum must be 1 or more" + got);
  }
}

// ---------------------------------------------------------------- sizes

TEST(Batch, HalvingAndBisectTryTheSizesTheyPromise) {
  Sizes tried;
  EXPECT_EQ(batch(100, up_to(10, &tried), {.strategy = Strategy::halving}), 6);
  EXPECT_EQ(tried, (Sizes{100, 50, 25, 12, 6}));
  tried.clear();
  EXPECT_EQ(batch(100, up_to(30, &tried), {.strategy = Strategy::bisect}), 25);
  EXPECT_EQ(tried, (Sizes{100, 50, 25}));
}

TEST(Batch, KeepsToMultiplesOfTheQuantum) {
  for (const Strategy strategy : {Strategy::predictive, Strategy::halving, Strategy::bisect}) {
    for (const std::int64_t most : {5, 40, 70, 900}) {
      Sizes tried;
      EXPECT_LE(batch(1000, up_to(most, &tried), {.strategy = strategy, .quantum = 32}), most);
      for (std::size_t i = 1; i < tried.size(); ++i) {
        EXPECT_TRUE(tried[i] <= 32 || tried[i] % 32 == 0) << tried[i];
        EXPECT_LT(tried[i], tried[i - 1]);
      }
    }
  }
}

TEST(Batch, DoesNotGoBelowTheFloor) {
  for (const Strategy strategy : {Strategy::predictive, Strategy::halving, Strategy::bisect}) {
    Sizes tried;
    EXPECT_THROW(batch(100, up_to(9, &tried), {.strategy = strategy, .lower = 10}),
                 c10::OutOfMemoryError);
    EXPECT_EQ(tried.back(), 10) << "the floor itself is tried";
    EXPECT_EQ(batch(100, up_to(10), {.strategy = strategy, .lower = 10}), 10);
  }
  EXPECT_EQ(batch(5, [](std::int64_t size) { return size; }, {.lower = 10}), 5)
      << "a call that wants less than the floor has its own";
}

TEST(Batch, SizesThatFailedAreNotTriedAgainInOneCall) {
  Sizes tried;
  EXPECT_THROW(batch(1 << 20, up_to(0, &tried)), c10::OutOfMemoryError);
  EXPECT_LE(tried.size(), 30U);
  for (std::size_t i = 1; i < tried.size(); ++i) {
    EXPECT_LT(tried[i], tried[i - 1]);
  }
  EXPECT_EQ(tried.back(), 1);
}

// Distances to many points and the nearest few of them, for `size` queries at a time.
at::Tensor nearest(const at::Tensor& queries, const at::Tensor& points, std::int64_t size) {
  std::vector<at::Tensor> parts;
  for (std::int64_t begin = 0; begin < queries.size(0); begin += size) {
    const at::Tensor part = queries.narrow(0, begin, std::min(size, queries.size(0) - begin));
    parts.push_back(std::get<1>(at::mm(part, points.t()).neg().topk(3)));
  }
  return parts.back();
}

TEST(Batch, NearestNeighboursAreNoWorseThanHalvingAndThenNearTheMaximum) {
  const at::Tensor queries = at::rand({3000, 8});
  const at::Tensor points = at::rand({2000, 8});
  for (const std::int64_t room : {10 * kMiB, 23 * kMiB, 37 * kMiB}) {
    const Budget budget = room_for(room);
    std::int64_t most = 1;
    for (std::int64_t fails = 3001; fails - most > 1;) {
      const std::int64_t middle = (most + fails) / 2;
      try {
        nearest(queries, points, middle);
        most = middle;
      } catch (const c10::OutOfMemoryError&) {
        fails = middle;
      }
    }
    ASSERT_LT(most, 3000);
    SizeMemory memory;
    double share = 0.0;
    for (int call = 1; call <= 3; ++call) {
      std::vector<Attempt> attempts;
      batch(3000, [&](std::int64_t size) { return nearest(queries, points, size); },
            {.memory = &memory, .attempts = &attempts});
      share = static_cast<double>(attempts.back().values.front()) / static_cast<double>(most);
      int halvings = 0;
      while ((3000 >> halvings) > most) {
        ++halvings;
      }
      EXPECT_LE(failures_of(attempts), call == 1   ? halvings + 1
                                       : call == 2 ? 1
                                                   : 0)
          << ::testing::PrintToString(sizes_of(attempts));
      EXPECT_GE(attempts.back().values.front(), 3000 >> halvings) << "at call " << call;
    }
    EXPECT_GE(share, 0.98);
  }
}

// ---------------------------------------------------------------- what failed is gone

TEST(Batch, MemoryIsBackWhereItWasWhenTheRetryBegins) {
  std::vector<Attempt> attempts;
  for (const bool watched : {false, true}) {
    const std::int64_t before = held_now();
    const Budget budget = room_for(10 * kMiB);
    int calls = 0;
    batch(64,
          [&](std::int64_t size) {
            ++calls;
            EXPECT_EQ(held_now(), before) << "at call " << calls;
            std::vector<at::Tensor> tensors;
            for (std::int64_t i = 0; i < size; ++i) {
              tensors.push_back(tensor_of(kMiB));
            }
          },
          {.attempts = watched ? &attempts : nullptr});
    EXPECT_GT(calls, 1);
  }
}

/// An error that keeps a tensor alive, as a traceback or a wrapped request would.
struct ErrorWithTensor : c10::OutOfMemoryError {
  explicit ErrorWithTensor(std::shared_ptr<at::Tensor> kept)
      : c10::OutOfMemoryError(c10::SourceLocation{__func__, __FILE__, __LINE__},
                              "CPU out of memory."),
        tensor(std::move(kept)) {}
  std::shared_ptr<at::Tensor> tensor;
};

TEST(Batch, WhatTheExceptionHeldIsGoneWhenTheRetryBegins) {
  std::vector<Attempt> attempts;
  for (const bool watched : {false, true}) {
    std::weak_ptr<at::Tensor> earlier;
    int calls = 0;
    batch(64,
          [&](std::int64_t size) {
            EXPECT_TRUE(earlier.expired()) << "at call " << calls;
            auto tensor = std::make_shared<at::Tensor>(tensor_of(kMiB));
            earlier = tensor;
            ++calls;
            if (size > 9) {
              throw ErrorWithTensor(tensor);
            }
          },
          {.strategy = Strategy::halving, .attempts = watched ? &attempts : nullptr});
    EXPECT_EQ(calls, 4);
  }
}

TEST(Batch, RetriesOutsideOfAnyCatchBlock) {
  std::vector<Attempt> attempts;
  for (const bool watched : {false, true}) {
    int calls = 0;
    batch(64,
          [&](std::int64_t size) {
            ++calls;
            EXPECT_EQ(std::current_exception(), nullptr);
            EXPECT_EQ(std::uncaught_exceptions(), 0);
            if (size > 9) {
              throw_out_of_memory();
            }
          },
          {.strategy = Strategy::halving,
           .attempts = watched ? &attempts : nullptr,
           .observer = nullptr});
    EXPECT_EQ(calls, 4);
  }
}

TEST(Batch, ObserverAndCollectorRunOutsideOfAnyCatchBlock) {
  at::Tensor leaked;
  int told = 0;
  int collected = 0;
  const auto nothing_in_flight = [] {
    EXPECT_EQ(std::current_exception(), nullptr);
    EXPECT_EQ(std::uncaught_exceptions(), 0);
  };
  batch(4,
        [&](std::int64_t size) {
          if (size > 2) {
            leaked = tensor_of(kMiB);
            throw_out_of_memory();
          }
        },
        {.observer =
             [&](const Attempt&) {
               nothing_in_flight();
               ++told;
             },
         .collect_garbage =
             [&] {
               nothing_in_flight();
               leaked.reset();
               ++collected;
             }});
  EXPECT_EQ(told, 2);
  EXPECT_EQ(collected, 1);
}

TEST(Batch, AFailureInsideBackwardLeavesNothingBehind) {
  held_now();  // from here on every tensor is counted
  const at::Tensor weight = at::ones({1000}).requires_grad_();
  const std::int64_t before = held_now();
  int failed_in_backward = 0;
  for (std::int64_t failing = 1; failing <= 12; ++failing) {
    const testing::OomInjector injector(failing);
    int calls = 0;
    bool in_backward = false;
    batch(8, [&](std::int64_t) {
      ++calls;
      failed_in_backward += in_backward ? 1 : 0;
      weight.mutable_grad() = at::Tensor();
      EXPECT_EQ(held_now(), before) << "at call " << calls << ", failing at " << failing;
      in_backward = false;
      // While one branch fails, the engine still holds the other, which it has not run yet.
      const at::Tensor loss = weight.mul(weight).exp().add(weight.mul(2).exp()).sum();
      in_backward = true;
      loss.backward();
      in_backward = false;
    });
    EXPECT_EQ(injector.failures(), calls - 1);
    weight.mutable_grad() = at::Tensor();
  }
  EXPECT_GE(failed_in_backward, 3);
}

TEST(Batch, IsRefusedWhatTheMachineDoesNotHaveUnlessItHasNoHostLimit) {
  install_cpu_allocator();
  for (const bool limited : {true, false}) {
    std::string refusal;
    const auto work = [&](std::int64_t) {
      try {
        tensor_of(2 * read_host_memory().physical_total);
      } catch (const c10::Error& error) {
        refusal = error.what_without_backtrace();
      }
    };
    batch(1, work, {.host_limit = limited});
    EXPECT_EQ(refusal.find("that the machine and its cgroups have") != std::string::npos, limited);
  }
}

// ---------------------------------------------------------------- random numbers

TEST(Batch, ResultDoesNotDependOnHowManyTriesItTook) {
  std::vector<Attempt> attempts;
  for (const bool watched : {false, true}) {
    expect_same_result_wherever_it_fails([&] {
      return batch(64,
                   [](std::int64_t size) {
                     const at::Tensor scratch = at::zeros({size});
                     const at::Tensor x = at::dropout(at::rand({50}), 0.5, true);
                     return at::dropout(x.add(at::rand({50})), 0.3, true);
                   },
                   {.attempts = watched ? &attempts : nullptr});
    });
  }
}

TEST(Batch, RandomStateCanBeLeftAlone) {
  const auto draw_twice = [](bool restore) {
    at::manual_seed(5);
    std::vector<float> drawn;
    batch(2,
          [&](std::int64_t size) {
            drawn.push_back(at::rand({1}).item<float>());
            if (size == 2) {
              throw_out_of_memory();
            }
          },
          {.restore_random_state = restore});
    return drawn;
  };
  const auto restored = draw_twice(true);
  EXPECT_EQ(restored[0], restored[1]);
  const auto moved_on = draw_twice(false);
  EXPECT_EQ(moved_on[0], restored[0]);
  EXPECT_NE(moved_on[0], moved_on[1]);
}

// ---------------------------------------------------------------- calls inside calls

TEST(Batch, WhenAnInnerCallGivesUpTheOuterOneShrinks) {
  std::vector<std::string> tried;
  const std::int64_t result =
      batch(16,
            [&](std::int64_t outer) {
              return batch(4,
                           [&](std::int64_t inner) {
                             tried.push_back(std::to_string(outer) + "x" + std::to_string(inner));
                             if (outer * inner > 6) {
                               throw_out_of_memory();
                             }
                             return outer * inner;
                           },
                           {.strategy = Strategy::halving});
            },
            {.strategy = Strategy::halving});
  EXPECT_EQ(result, 4);
  EXPECT_EQ(tried, (std::vector<std::string>{"16x4", "16x2", "16x1", "8x4", "8x2", "8x1", "4x4",
                                             "4x2", "4x1"}));
}

TEST(Batch, NestedCallsBothAdaptToABudget) {
  const Budget budget = room_for(8 * kMiB);
  std::vector<Attempt> outer_attempts;
  std::vector<Attempt> inner_attempts;
  batch(64,
        [&](std::int64_t outer) {
          const at::Tensor mine = tensor_of(outer * kMiB / 8);
          batch(64, [&](std::int64_t inner) { tensor_of(inner * kMiB / 8); },
                {.attempts = &inner_attempts});
        },
        {.attempts = &outer_attempts});
  EXPECT_TRUE(outer_attempts.back().fitted());
  EXPECT_TRUE(inner_attempts.back().fitted());
  EXPECT_LT(inner_attempts.back().values.front(), 64);
  // Together they used what there is, and the outer one's peak includes the inner one's.
  EXPECT_EQ(
      *outer_attempts.back().peak,
      (outer_attempts.back().values.front() + inner_attempts.back().values.front()) * kMiB / 8);
}

TEST(Batch, WhatOthersLearnDuringTheFirstTryIsNotTakenForItsSize) {
  SizeMemory memory;
  Sizes tried;
  const auto learn = [&](std::int64_t size, bool fitted) {
    memory.learn(7, {.values = {size}, .outcome = fitted ? OomKind::none : OomKind::host_memory});
  };
  batch(8,
        [&](std::int64_t size) {
          tried.push_back(size);
          learn(1, true);  // as a nested call or another thread would
          learn(2, false);
          if (size == 8) {
            throw_out_of_memory();
          }
        },
        {.strategy = Strategy::halving, .memory = &memory, .key = 7});
  EXPECT_EQ(tried, (Sizes{8, 4})) << "it failed at 8, not at 1";
  for (const Attempt& known : memory.recall(7)) {
    EXPECT_TRUE(known.fitted() || known.size() != 1);
  }
}

TEST(Batch, OtherThreadsMayCallAtTheSameTime) {
  SizeMemory memory(4);
  in_threads(8, [&](int thread) {
    for (int i = 0; i < 200; ++i) {
      const std::int64_t most = 3 + thread;
      const std::int64_t size = batch(
          64, up_to(most), {.memory = &memory, .key = static_cast<std::uint64_t>(thread % 6)});
      EXPECT_LE(size, most);
      EXPECT_GE(size, 1);
    }
  });
  EXPECT_LE(memory.size(), 4U);
}

}  // namespace
}  // namespace brim
