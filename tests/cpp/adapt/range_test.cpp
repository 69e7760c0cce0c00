#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>
#include <brim/adapt/adapt.h>
#include <brim/adapt/size_memory.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <stdexcept>
#include <vector>

#include "adapt/calls.h"
#include "need/memory_simulation.h"

namespace brim {
namespace {

using namespace tests;

/// Whether parts come one after the other, none twice and none left out.
class Coverage {
 public:
  explicit Coverage(std::int64_t start) : at_(start) {}

  void begin(std::int64_t begin, std::int64_t end) const {
    EXPECT_EQ(begin, at_) << "what is finished is not done again, and nothing is left out";
    EXPECT_GT(end, begin);
  }
  void finish(std::int64_t end) { at_ = end; }
  std::int64_t at() const { return at_; }

 private:
  std::int64_t at_;
};

TEST(Range, CoversEverythingOnceWhateverFails) {
  simulation::Random random(11);
  SizeMemory memory(16);
  constexpr int kCases = 6000;
  std::int64_t failures = 0;
  for (int i = 0; i < kCases && !::testing::Test::HasFailure(); ++i) {
    const std::int64_t start = random.integer(-1000, 1000);
    const std::int64_t length = random.magnitude(1, 20000);
    const std::int64_t initial = random.magnitude(1, 30000);
    const std::int64_t lower = random.coin() ? 1 : random.magnitude(1, 50);
    const std::int64_t most = std::max(lower, random.magnitude(1, 30000));
    const double bad_luck = random.coin() ? 0.0 : random.real(0, 0.5);
    const bool figures = random.coin();
    AdaptOptions options{.strategy = static_cast<Strategy>(random.integer(0, 2)),
                         .lower = lower,
                         .quantum = random.coin() ? 1 : random.magnitude(1, 300)};
    if (random.coin()) {
      options.memory = &memory;
      options.key = static_cast<std::uint64_t>(random.integer(0, 20));
    }
    Coverage coverage(start);
    std::int64_t calls = 0;
    range(
        start, start + length, initial,
        [&](std::int64_t begin, std::int64_t end) {
          coverage.begin(begin, end);
          ASSERT_LE(end - begin, initial);
          ++calls;
          const std::int64_t size = end - begin;
          if (size > lower && (size > most || random.real(0, 1) < bad_luck)) {
            ++failures;
            if (figures) {
              TORCH_CHECK_WITH(OutOfMemoryError, false, "CPU out of memory. Tried to allocate ",
                               random.magnitude(1, 1e12), " bytes");
            }
            throw_out_of_memory();
          }
          coverage.finish(end);
        },
        options);
    ASSERT_EQ(coverage.at(), start + length);
    ASSERT_LE(calls, 200 + 40 * length) << "case " << i;
  }
  EXPECT_GT(failures, kCases) << "the cases are hard enough";
}

TEST(Range, AffineNeedReachesNearlyTheMaximumWithoutAnyFailure) {
  simulation::Random random(12);
  for (int i = 0; i < 60; ++i) {
    const std::int64_t room = random.integer(8, 64) * kMiB;
    const AffineWork work{.base = random.integer(0, room / 2),
                          .slope = random.magnitude(100, 20000)};
    const std::int64_t most = work.largest_within(room);
    const Budget budget = room_for(room);
    std::vector<Attempt> attempts;
    range(0, 50 * most, 4 * most, [&](std::int64_t begin, std::int64_t end) { work(end - begin); },
          {.attempts = &attempts});
    EXPECT_EQ(failures_of(attempts), 0) << ::testing::PrintToString(sizes_of(attempts));
    const std::int64_t step = attempts[attempts.size() - 2].values.front();
    EXPECT_GE(step, most * 95 / 100) << ::testing::PrintToString(sizes_of(attempts));
  }
}

TEST(Range, ASecondRangeStartsAtTheSizeThatTheFirstFound) {
  const AffineWork work{.base = kMiB, .slope = 1000};
  const Budget budget = room_for(9 * kMiB);
  const std::int64_t most = work.largest_within(9 * kMiB);
  SizeMemory memory;
  for (int call = 0; call < 2; ++call) {
    std::vector<Attempt> attempts;
    range(0, 20 * most, 4 * most, [&](std::int64_t begin, std::int64_t end) { work(end - begin); },
          {.memory = &memory, .attempts = &attempts});
    EXPECT_EQ(failures_of(attempts), 0);
    if (call == 1) {
      EXPECT_GE(attempts.front().values.front(), most * 95 / 100);
    }
  }
}

TEST(Range, TheFirstPartIsRecordedEvenIfTheSizeIsKnown) {
  SizeMemory memory;
  std::vector<Attempt> attempts;
  for (int call = 0; call < 2; ++call) {
    attempts.clear();
    const auto part = [](std::int64_t begin, std::int64_t end) { tensor_of(100 * (end - begin)); };
    range(0, 1000, 100, part, {.memory = &memory, .attempts = &attempts});
  }
  EXPECT_EQ(attempts.front().size(), 100) << "it is known";
  EXPECT_NE(attempts.front().trace, nullptr);
  EXPECT_EQ(attempts.back().trace, nullptr) << "one is enough";
}

TEST(Range, StepsOfHalvingAreThoseOfToma) {
  std::vector<std::int64_t> sizes;
  range(0, 100, 32,
        [&](std::int64_t begin, std::int64_t end) {
          sizes.push_back(end - begin);
          if (end - begin > 10) {
            throw_out_of_memory();
          }
        },
        {.strategy = Strategy::halving});
  ASSERT_GE(sizes.size(), 3U);
  EXPECT_EQ(sizes[0], 32);
  EXPECT_EQ(sizes[1], 16);
  for (std::size_t i = 2; i + 1 < sizes.size(); ++i) {
    EXPECT_EQ(sizes[i], 8);
  }
  EXPECT_EQ(sizes.back(), 100 % 8);
}

TEST(Range, MemoryLeftBehindByThePartsMakesThemSmallerWithoutFailing) {
  // Results pile up: what is free shrinks while the range is under way.
  const Budget budget = room_for(40 * kMiB);
  std::vector<at::Tensor> results;
  std::vector<Attempt> attempts;
  range(0, 10000, 10000,
        [&](std::int64_t begin, std::int64_t end) {
          at::Tensor result = tensor_of(1024 * (end - begin));
          const at::Tensor scratch = tensor_of(8 * 1024 * (end - begin));
          results.push_back(std::move(result));
        },
        {.attempts = &attempts});
  EXPECT_LE(failures_of(attempts), 1) << ::testing::PrintToString(sizes_of(attempts));
}

TEST(Range, AnEmptyRangeCallsNothing) {
  for (const std::int64_t at : {std::int64_t{-3}, std::int64_t{0}, std::int64_t{7}}) {
    range(at, at, 5, [](std::int64_t, std::int64_t) { FAIL() << "called"; });
  }
}

TEST(Range, TheLargestNumbersWork) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  std::int64_t at = kMost - 5;
  range(kMost - 5, kMost, kMost, [&](std::int64_t begin, std::int64_t end) {
    EXPECT_EQ(begin, at);
    at = end;
  });
  EXPECT_EQ(at, kMost);
}

TEST(Range, WrongArgumentsAreNamed) {
  const auto nothing = [](std::int64_t, std::int64_t) {};
  EXPECT_CONTAINS(message_of<c10::ValueError>([&] { range(5, 4, 1, nothing); }),
                  "start must not be after end, got 5 and 4");
  EXPECT_CONTAINS(message_of<c10::ValueError>([&] { range(0, 4, 0, nothing); }),
                  "initial must be 1 or more, got 0");
  EXPECT_CONTAINS(message_of<c10::ValueError>([&] { range(0, 4, 1, nothing, {.lower = 0}); }),
                  "lower must be 1 or more, got 0");
  EXPECT_CONTAINS(message_of<c10::ValueError>([&] { range(0, 4, 1, nothing, {.quantum = -1}); }),
                  "quantum must be 1 or more, got -1");
  EXPECT_CONTAINS(message_of<c10::ValueError>([&] {
                    range(std::numeric_limits<std::int64_t>::min(),
                          std::numeric_limits<std::int64_t>::max(), 1, nothing);
                  }),
                  "start and end must be less than 2^63 apart");
}

TEST(Range, AnotherErrorEndsItAtOnceAndPassesUntouched) {
  std::vector<std::int64_t> begins;
  EXPECT_THROW(range(0, 100, 1,
                     [&](std::int64_t begin, std::int64_t) {
                       begins.push_back(begin);
                       if (begin == 3) {
                         throw std::domain_error("stop");
                       }
                     }),
               std::domain_error);
  EXPECT_EQ(begins, (std::vector<std::int64_t>{0, 1, 2, 3}));
}

TEST(Range, GivesUpAtTheFloorAndKeepsWhatIsFinished) {
  Coverage coverage(0);
  const std::string message = message_of<c10::OutOfMemoryError>([&] {
    range(0, 100, 10,
          [&](std::int64_t begin, std::int64_t end) {
            coverage.begin(begin, end);
            if (end > 57) {
              throw_out_of_memory();
            }
            coverage.finish(end);
          },
          {.name = "step"});
  });
  EXPECT_EQ(coverage.at(), 57);
  EXPECT_CONTAINS(message, "step = 1, the smallest that is allowed");
}

TEST(Range, PartsAreRetriedOutsideOfAnyCatchBlockWithTheirMemoryBack) {
  const std::int64_t before = held_now();
  const Budget budget = room_for(4 * kMiB);
  int failures = 0;
  range(0, 64, 64,
        [&](std::int64_t begin, std::int64_t end) {
          EXPECT_EQ(held_now(), before);
          EXPECT_EQ(std::current_exception(), nullptr);
          EXPECT_EQ(std::uncaught_exceptions(), 0);
          try {
            const at::Tensor first = tensor_of(kMiB);
            const at::Tensor second = tensor_of(kMiB * (end - begin));
          } catch (const c10::OutOfMemoryError&) {
            ++failures;
            throw;
          }
        },
        {.strategy = Strategy::halving});
  EXPECT_GT(failures, 2);
}

TEST(Range, ResultDoesNotDependOnHowManyTriesItTook) {
  const at::Tensor out = at::zeros({200});
  expect_same_result_wherever_it_fails([&] {
    out.zero_();
    range(0, 200, 64,
          [&](std::int64_t begin, std::int64_t end) {
            // Uniform numbers are drawn one by one: the same however the range is cut.
            const at::Tensor drawn = at::rand({end - begin});
            out.narrow(0, begin, end - begin).copy_(drawn.mul(drawn.gt(0.5)));
          },
          {.strategy = Strategy::halving});
    return out;
  });
}

TEST(Range, EachPartStartsItsRetryWithItsOwnRandomState) {
  at::manual_seed(9);
  std::vector<float> drawn;
  std::vector<std::int64_t> begins;
  range(0, 8, 4,
        [&](std::int64_t begin, std::int64_t end) {
          begins.push_back(begin);
          drawn.push_back(at::rand({1}).item<float>());
          if (begin == 4 && end - begin > 2) {
            throw_out_of_memory();
          }
        },
        {.strategy = Strategy::halving});
  EXPECT_EQ(begins, (std::vector<std::int64_t>{0, 4, 4, 6}));
  EXPECT_NE(drawn[0], drawn[1]);
  EXPECT_EQ(drawn[1], drawn[2]) << "the part that failed begins again";
  EXPECT_NE(drawn[2], drawn[3]);
}

}  // namespace
}  // namespace brim
