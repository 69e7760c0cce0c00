// What an adaptive call tells about its tries: the record, observers, warnings, the last error.

#include <brim/adapt/adapt.h>
#include <brim/need/trace.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "adapt/calls.h"

namespace brim {
namespace {

using namespace tests;

[[noreturn]] void throw_text(const std::string& text) { TORCH_CHECK(false, text); }

TEST(AttemptRecord, FiguresAreExact) {
  const std::int64_t before = held_now();
  const Budget budget = room_for(1'000'000);
  std::vector<Attempt> attempts;
  batch(100,
        [&](std::int64_t size) {
          const at::Tensor constant = tensor_of(300'001);
          const at::Tensor growing = tensor_of(10'007 * size);
        },
        {.strategy = Strategy::halving, .attempts = &attempts});
  ASSERT_EQ(sizes_of(attempts), (std::vector<std::int64_t>{100, 50}));
  const Attempt& failed = attempts[0];
  EXPECT_FALSE(failed.fitted());
  EXPECT_EQ(failed.outcome, OomKind::host_memory);
  EXPECT_EQ(failed.peak, 300'001);
  EXPECT_EQ(failed.requested, 1'000'700);
  EXPECT_EQ(failed.held, before);
  EXPECT_EQ(failed.available, 1'000'000);
  EXPECT_GT(failed.seconds, 0.0);
  const Attempt& fitted = attempts[1];
  EXPECT_TRUE(fitted.fitted());
  EXPECT_EQ(fitted.peak, 300'001 + 500'350);
  EXPECT_EQ(fitted.requested, std::nullopt);
  EXPECT_EQ(fitted.held, before);
  EXPECT_EQ(fitted.available, 1'000'000);
  EXPECT_GT(fitted.seconds, 0.0);
  EXPECT_FALSE(fitted.repeats);
}

TEST(AttemptRecord, TheLevelOfATryIsWhatWasInUseWhenItBegan) {
  at::Tensor gradients = tensor_of(200'000);
  const std::int64_t others = held_now() - 200'000;
  const Budget budget(others + 1'000'000, at::kCPU);
  std::vector<Attempt> attempts;
  for (int call = 0; call < 2; ++call) {
    batch(100,
          [&](std::int64_t size) {
            gradients.reset();
            const at::Tensor growing = tensor_of(10'000 * size);
            gradients = tensor_of(200'000);
          },
          {.strategy = Strategy::halving, .attempts = &attempts});
  }
  ASSERT_EQ(sizes_of(attempts), (std::vector<std::int64_t>{100, 50, 100, 50}));
  for (const Attempt& attempt : attempts) {
    // A failure has freed the gradients of the call before.
    EXPECT_EQ(attempt.need(), attempt.fitted() ? 700'000 : 1'000'000);
    EXPECT_EQ(attempt.held, attempt.fitted() ? others : others + 200'000);
    EXPECT_EQ(attempt.left, attempt.fitted() ? 200'000 : -200'000);
    EXPECT_EQ(attempt.available, attempt.fitted() ? 1'000'000 : 800'000);
  }
}

TEST(AttemptRecord, WhatAFailureLeavesIsToldAndIsThereWhenTheNextBegins) {
  const CapturedWarnings warnings;
  at::Tensor gradients;
  const std::int64_t before = held_now();
  const Budget budget = room_for(1'000'000);
  std::vector<Attempt> attempts;
  batch(100,
        [&](std::int64_t size) {
          gradients.reset();
          gradients = tensor_of(200'000);
          tensor_of(10'000 * size);
        },
        {.strategy = Strategy::halving, .attempts = &attempts});
  ASSERT_EQ(sizes_of(attempts), (std::vector<std::int64_t>{100, 50}));
  EXPECT_EQ(attempts[0].need(), 1'200'000);
  EXPECT_EQ(attempts[0].held, before);
  EXPECT_EQ(attempts[0].left, 200'000);
  EXPECT_EQ(attempts[1].need(), 500'000) << "above what the failure left";
  EXPECT_EQ(attempts[1].held, before + 200'000);
  EXPECT_EQ(attempts[1].left, 0);
  EXPECT_EQ(attempts[1].available, 800'000);
}

TEST(AttemptRecord, RequestsOnTheCpuAreKnownOnceASizeHasFailed) {
  const Budget budget = room_for(1'000'000);
  std::vector<Attempt> attempts;
  SizeMemory memory;
  for (int call = 0; call < 2; ++call) {
    batch(100,
          [&](std::int64_t size) {
            const at::Tensor kept = tensor_of(1'000 * size);
            tensor_of(10'000 * size);
          },
          {.strategy = Strategy::halving, .memory = &memory, .attempts = &attempts});
  }
  ASSERT_EQ(sizes_of(attempts), (std::vector<std::int64_t>{100, 50, 50}));
  EXPECT_FALSE(attempts[0].trace) << "the first try is not watched";
  for (const Attempt& fit : {attempts[1], attempts[2]}) {
    ASSERT_TRUE(fit.trace);
    ASSERT_EQ(fit.trace->requests.size(), 2U);
    EXPECT_EQ(fit.trace->requests[0].bytes, 50'000);
    EXPECT_EQ(fit.trace->requests[1].bytes, 500'000);
    EXPECT_EQ(fit.trace->events, (std::vector<std::int32_t>{0, 1, ~1, ~0}));
  }
}

TEST(AttemptRecord, RequestsOfAWatchedFirstCallAreKnown) {
  std::vector<Attempt> attempts;
  SizeMemory memory;
  batch(100, [&](std::int64_t size) { tensor_of(1'000 * size); },
        {.memory = &memory, .attempts = &attempts});
  ASSERT_EQ(attempts.size(), 1U);
  ASSERT_TRUE(attempts[0].trace) << "the next one may have less memory";
  EXPECT_EQ(attempts[0].trace->requests.front().bytes, 100'000);
}

TEST(AttemptRecord, PeakIsOfTheTryNotOfWhatWasHeldBefore) {
  const at::Tensor older = tensor_of(5 * kMiB);
  const std::int64_t before = held_now();
  std::vector<Attempt> attempts;
  range(0, 3, 1, [](std::int64_t, std::int64_t) { tensor_of(777); }, {.attempts = &attempts});
  ASSERT_EQ(attempts.size(), 3U);
  for (const Attempt& attempt : attempts) {
    EXPECT_EQ(attempt.peak, 777);
    EXPECT_EQ(attempt.held, before);
  }
}

TEST(AttemptRecord, AppendsToWhatIsThere) {
  std::vector<Attempt> attempts(1);
  batch(4, [](std::int64_t) {}, {.attempts = &attempts});
  ASSERT_EQ(attempts.size(), 2U);
  EXPECT_EQ(attempts[1].values, (std::vector<std::int64_t>{4}));
}

TEST(AttemptRecord, ObserverHearsOfEachTryInOrderAfterItEnded) {
  std::vector<std::string> events;
  const auto observer = [&](const Attempt& attempt) {
    events.push_back((attempt.fitted() ? "fitted " : "failed ") +
                     std::to_string(attempt.values.front()));
  };
  batch(8,
        [&](std::int64_t size) {
          events.push_back("try " + std::to_string(size));
          if (size > 2) {
            throw_out_of_memory();
          }
        },
        {.strategy = Strategy::halving, .observer = observer});
  EXPECT_EQ(events, (std::vector<std::string>{"try 8", "failed 8", "try 4", "failed 4", "try 2",
                                              "fitted 2"}));
}

TEST(AttemptRecord, AnObserversErrorEndsTheCall) {
  struct Stop {};
  int calls = 0;
  EXPECT_THROW(batch(8,
                     [&](std::int64_t) {
                       ++calls;
                       throw_out_of_memory();
                     },
                     {.observer = [](const Attempt&) { throw Stop{}; }}),
               Stop);
  EXPECT_EQ(calls, 1);
}

// ---------------------------------------------------------------- leaks

TEST(AttemptRecord, WarnsOnceOfATensorThatAFailedTryLeftBehind) {
  const CapturedWarnings warnings;
  std::vector<at::Tensor> leaked;
  std::vector<Attempt> attempts;
  for (const bool watched : {false, true}) {
    leaked.clear();
    batch(8,
          [&](std::int64_t size) {
            if (size > 2) {
              leaked.push_back(tensor_of(3 * kMiB));
              throw_out_of_memory();
            }
          },
          {.strategy = Strategy::halving, .attempts = watched ? &attempts : nullptr});
    ASSERT_EQ(leaked.size(), 2U);
  }
  ASSERT_EQ(warnings.texts().size(), 2U) << "one a call";
  EXPECT_CONTAINS(warnings.texts()[0],
                  "3.00 MiB of a failed attempt's memory on cpu did not come back");
}

TEST(AttemptRecord, GarbageIsCollectedFirstAndOnlyWhereSomethingIsMissing) {
  const CapturedWarnings warnings;
  at::Tensor garbage;
  int collections = 0;
  const AdaptOptions options{.strategy = Strategy::halving, .collect_garbage = [&] {
                               ++collections;
                               garbage.reset();
                             }};
  const auto run = [&](bool leaks) {
    batch(
        4,
        [&](std::int64_t size) {
          if (size > 1) {
            const at::Tensor proper = tensor_of(3 * kMiB);
            if (leaks) {
              garbage = tensor_of(3 * kMiB);
            }
            throw_out_of_memory();
          }
        },
        options);
  };
  run(false);
  EXPECT_EQ(collections, 0);
  run(true);
  EXPECT_EQ(collections, 2);
  EXPECT_TRUE(warnings.texts().empty()) << warnings.texts().front();
}

TEST(AttemptRecord, NeitherResultsThatPileUpNorFreedTensorsAreLeaks) {
  const CapturedWarnings warnings;
  std::vector<at::Tensor> results;
  range(0, 64, 16,
        [&](std::int64_t begin, std::int64_t end) {
          if (end - begin > 4) {
            throw_out_of_memory();
          }
          results.push_back(tensor_of(kMiB));
        },
        {.strategy = Strategy::halving});
  at::Tensor older = tensor_of(kMiB);
  batch(4, [&](std::int64_t size) {
    older.reset();
    if (size > 1) {
      throw_out_of_memory();
    }
  });
  EXPECT_TRUE(warnings.texts().empty()) << warnings.texts().front();
}

// ---------------------------------------------------------------- giving up

TEST(AttemptRecord, GivingUpIsOutOfMemoryWithASummary) {
  const at::Tensor older = tensor_of(kMiB);
  const std::int64_t before = held_now();
  const Budget budget(before + 2 * kMiB, at::kCPU);
  std::vector<Attempt> attempts;
  for (const bool watched : {false, true}) {
    const std::string message = message_of<c10::OutOfMemoryError>([&] {
      batch(8,
            [](std::int64_t size) {
              const at::Tensor constant = tensor_of(kMiB);
              const at::Tensor growing = tensor_of((4 + size) * kMiB);
            },
            {.strategy = Strategy::halving,
             .attempts = watched ? &attempts : nullptr,
             .name = "batch_size"});
    });
    EXPECT_EQ(message.find("CPU out of memory. Tried to allocate 5.00 MiB"), 0U) << message;
    EXPECT_CONTAINS(message, "It does not fit even with batch_size = 1");
    EXPECT_CONTAINS(message,
                    "batch_size = 8: out of host memory, held 1.00 MiB, asked for 12.00 MiB more");
    EXPECT_CONTAINS(message,
                    "batch_size = 4: out of host memory, held 1.00 MiB, asked for 8.00 MiB more");
    EXPECT_CONTAINS(message,
                    "batch_size = 1: out of host memory, held 1.00 MiB, asked for 5.00 MiB more");
    EXPECT_CONTAINS(message, "limit " + format_bytes(before + 2 * kMiB));
    EXPECT_CONTAINS(message, "in use before the call " + format_bytes(before));
    EXPECT_CONTAINS(message, "free now 2.00 MiB");
    EXPECT_CONTAINS(message, "cached and unusable 0 B");
    EXPECT_CONTAINS(message, "The budget of " + format_bytes(before + 2 * kMiB) +
                                 " is too small: " + format_bytes(before) +
                                 " of it were in use before the call");
  }
}

TEST(AttemptRecord, ABudgetThatIsUsedUpBeforeTheCallIsNamed) {
  const at::Tensor older = tensor_of(2 * kMiB);
  const Budget budget(kMiB, at::kCPU);
  const std::string message = message_of<c10::OutOfMemoryError>(
      [] { batch(2, [](std::int64_t size) { tensor_of(size); }); });
  EXPECT_CONTAINS(message, "The budget of 1.00 MiB is too small: it was used up before the call");
}

TEST(AttemptRecord, ASummaryOfManyTriesKeepsTheFirstAndTheLast) {
  const std::string message = message_of<c10::OutOfMemoryError>([] {
    batch(std::int64_t{1} << 40, [](std::int64_t) { throw_out_of_memory(); },
          {.strategy = Strategy::halving});
  });
  EXPECT_CONTAINS(message, "size = 1099511627776: ");
  EXPECT_CONTAINS(message, "size = 1: ");
  EXPECT_EQ(message.find("size = 549755813888: "), std::string::npos);
}

TEST(AttemptRecord, GivingUpIsClassifiedLikeTheErrorItself) {
  try {
    batch(2, [](std::int64_t) { throw_out_of_memory(); });
    FAIL() << "no error";
  } catch (const std::exception& error) {
    EXPECT_EQ(classify(error).kind, OomKind::host_memory);
  }
}

// ---------------------------------------------------------------- causes

TEST(AttemptRecord, EveryCauseThatASmallerSizeCuresShrinks) {
  // Of devices that this machine may not have, too: an error may come from another process.
  const std::vector<std::pair<std::string, OomKind>> causes{
      {"CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
       OomKind::library_workspace},
      {"Unable to find a valid cuDNN algorithm to run convolution", OomKind::library_workspace},
      {"upsample_nearest: input has more than INT_MAX elements", OomKind::size_limit},
      {"Expected canUse32BitIndexMath(input) to be true", OomKind::size_limit},
      {"CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB",
       OomKind::device_memory},
      {"CUDA out of memory. Tried to allocate 2.00 GiB. GPU 117 has a total capacity of 8.00 GiB",
       OomKind::device_memory},
      {"XPU out of memory. Tried to allocate 2.00 GiB", OomKind::device_memory},
      {"MPS backend out of memory (MPS allocated: 1 GB)", OomKind::device_memory},
      {"DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000 bytes",
       OomKind::host_memory},
  };
  for (const auto& [text, kind] : causes) {
    for (const bool in_parts : {false, true}) {
      std::vector<Attempt> attempts;
      const AdaptOptions options{
          .strategy = Strategy::halving, .device = c10::Device(at::kCPU), .attempts = &attempts};
      const auto work = [&text](std::int64_t size) {
        if (size > 2) {
          throw_text(text);
        }
      };
      if (in_parts) {
        range(0, 8, 8, [&](std::int64_t begin, std::int64_t end) { work(end - begin); }, options);
      } else {
        batch(8, work, options);
      }
      ASSERT_GE(attempts.size(), 2U) << text;
      EXPECT_EQ(attempts.front().outcome, kind) << text;
      EXPECT_LE(attempts.back().values.front(), 2) << text;
      EXPECT_TRUE(attempts.back().fitted()) << text;
    }
  }
}

TEST(AttemptRecord, FiguresOfAnotherDeviceDoNotSpoilTheModel) {
  const Budget budget = room_for(10 * kMiB);
  std::vector<Attempt> attempts;
  for (const bool watched : {false, true}) {
    std::vector<std::int64_t> tried;
    batch(1000,
          [&](std::int64_t size) {
            tried.push_back(size);
            if (size > 600) {
              throw_text(
                  "CUDA out of memory. Tried to allocate 64.00 TiB. GPU 3 has a total capacity of "
                  "8.00 GiB. Of the allocated memory 7.00 GiB is allocated by PyTorch");
            }
          },
          {.device = c10::Device(at::kCPU), .attempts = watched ? &attempts : nullptr});
    EXPECT_EQ(tried, (std::vector<std::int64_t>{1000, 500})) << "without figures it halves";
  }
  EXPECT_EQ(attempts[0].peak, 0) << "of the device that is watched";
}

TEST(AttemptRecord, ASizeLimitHasNoFigures) {
  std::vector<std::int64_t> tried;
  batch(1000, [&](std::int64_t size) {
    tried.push_back(size);
    const at::Tensor small = tensor_of(100);
    if (size > 600) {
      throw_text("input tensor has more than INT_MAX elements");
    }
  });
  EXPECT_EQ(tried, (std::vector<std::int64_t>{1000, 500}));
}

TEST(AttemptRecord, ADeviceThatIsNotThereIsAnErrorAtOnce) {
  EXPECT_CONTAINS(message_of<c10::ValueError>([] {
                    batch(8, [](std::int64_t) { FAIL() << "called"; },
                          {.device = c10::Device(at::kMeta)});
                  }),
                  "device");
}

}  // namespace
}  // namespace brim
