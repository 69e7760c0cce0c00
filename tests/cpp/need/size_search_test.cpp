// The search whatever the numbers say: strategies, lattice, bounds, termination. Over many kinds of
// work: promises_test. In parts: probing_test.

#include <brim/adapt/size_memory.h>
#include <brim/need/size_search.h>
#include <brim/need/strategy.h>
#include <brim/need/trace.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "need/memory_simulation.h"

namespace brim {
namespace {

using namespace simulation;

// ---------------------------------------------------------------- strategies and options

TEST(Strategy, NamesAreParsedBack) {
  for (const Strategy s : {Strategy::predictive, Strategy::halving, Strategy::bisect}) {
    EXPECT_EQ(parse_strategy(to_string(s)), s);
  }
}

TEST(Strategy, UnknownNameIsAnErrorThatSaysWhatIsAllowed) {
  try {
    (void)parse_strategy("Halving");
    FAIL() << "no error";
  } catch (const std::invalid_argument& error) {
    const std::string text = error.what();
    for (const char* part : {"strategy", "'Halving'", "'predictive'", "'halving'", "'bisect'"}) {
      EXPECT_NE(text.find(part), std::string::npos) << text;
    }
  }
}

TEST(SizeSearch, WrongOptionIsAnErrorThatNamesIt) {
  const auto message = [](const SizeSearchOptions& options) -> std::string {
    try {
      const SizeSearch search(options);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_EQ(message({.upper = 0}), "upper=0 is not allowed; it must be at least lower");
  EXPECT_EQ(message({.upper = -3}), "upper=-3 is not allowed; it must be at least lower");
  EXPECT_EQ(message({.upper = 4, .lower = 0}), "lower=0 is not allowed; it must be at least 1");
  EXPECT_EQ(message({.upper = 4, .lower = 5}), "upper=4 is not allowed; it must be at least lower");
  EXPECT_EQ(message({.upper = 4, .quantum = 0}), "quantum=0 is not allowed; it must be at least 1");
  EXPECT_NE(message({.upper = 4, .circumstances = {.margin = -0.1}}).find("margin=-0.1"),
            std::string::npos);
  EXPECT_NE(message({.upper = 4, .circumstances = {.margin = std::nan("")}}).find("margin="),
            std::string::npos);
  EXPECT_EQ(message({.upper = 4, .lower = 4, .quantum = 9, .circumstances = {.margin = 0.5}}),
            "no error");
}

TEST(SizeSearch, OutcomeWithoutASizeIsAnError) {
  SizeSearch search({.upper = 8});
  EXPECT_THROW(search.record(fit(0)), std::invalid_argument);
  EXPECT_THROW(search.remember(failure(-1)), std::invalid_argument);
  EXPECT_THROW(search.record({}), std::invalid_argument);
}

// ---------------------------------------------------------------- any monotone predicate

struct Setting {
  Strategy strategy;
  Start start;
  bool numbers;
};

class SizeSearchOnAnyPredicate : public ::testing::TestWithParam<Setting> {};

TEST_P(SizeSearchOnAnyPredicate, EndsWithinItsBoundOnTheLatticeWithoutRepeatingAFailedSize) {
  const auto [strategy, start, numbers] = GetParam();
  Random random(1);
  for (int i = 0; i < 4000; ++i) {
    const SizeSearchOptions o = random_options(random, strategy, start);
    const std::int64_t threshold = random.integer(0, o.upper + 1);
    const std::int64_t available = random.magnitude(1e3, 1e10);
    SizeSearch search(o);
    std::set<std::int64_t> failed;
    while (!search.finished()) {
      const std::int64_t size = search.next();
      ASSERT_TRUE(allowed(size, o))
          << size << " of " << o.lower << ".." << o.upper << " q " << o.quantum;
      ASSERT_FALSE(failed.contains(size)) << size;
      ASSERT_GT(size, search.best().value_or(0));
      ASSERT_LT(size, search.smallest_failure().value_or(kHuge));
      ASSERT_LT(search.attempts(), bound_of_attempts(o));
      Attempt attempt = ended(size, size <= threshold);
      if (numbers) {  // arbitrary, and mostly absurd
        attempt.available = available - random.integer(0, available / 8);
        attempt.peak = random.integer(0, attempt.fitted() ? *attempt.available : available);
        attempt.requested = random.magnitude(1, 1e12);
      }
      search.record(attempt);
      if (!attempt.fitted()) {
        failed.insert(size);
      }
    }
    EXPECT_EQ(search.next(), search.best().value_or(o.lower));
  }
}

INSTANTIATE_TEST_SUITE_P(All, SizeSearchOnAnyPredicate,
                         ::testing::Values(Setting{Strategy::predictive, Start::at_upper, true},
                                           Setting{Strategy::predictive, Start::at_upper, false},
                                           Setting{Strategy::predictive, Start::probe, false},
                                           Setting{Strategy::halving, Start::at_upper, true},
                                           Setting{Strategy::bisect, Start::at_upper, true},
                                           Setting{Strategy::bisect, Start::at_upper, false}));

TEST(SizeSearch, FindsTheExactMaximumOfAnyMonotonePredicate) {
  Random random(2);
  for (const Strategy strategy : {Strategy::predictive, Strategy::bisect}) {
    for (int i = 0; i < 4000; ++i) {
      const SizeSearchOptions o = random_options(random, strategy, Start::at_upper);
      const std::int64_t threshold = random.integer(0, o.upper + 1);
      const double power = random.real(0.3, 3);
      const Curve need = [=](std::int64_t s) {  // one byte steps in at the threshold
        return static_cast<std::int64_t>(
                   1e6 * std::pow(static_cast<double>(s) / static_cast<double>(o.upper), power)) +
               (s > threshold ? 100'000'000 : 0);
      };
      SizeSearch search(o);
      until_finished(search, need, 50'000'000);
      ASSERT_EQ(search.best().value_or(0), largest_allowed(threshold, o))
          << o.lower << ".." << o.upper << " q " << o.quantum;
    }
  }
}

TEST(SizeSearch, ExactMaximumOfAnAffineNeedTakesFewAttempts) {
  Random random(3);
  for (int i = 0; i < 3000; ++i) {
    const Affine f = random_affine(random, 512, 1e8);
    const std::int64_t upper = f.most * random.integer(1, 30);
    SizeSearch search({.upper = upper});
    const Attempts run = until_finished(search, f.need, f.available, f.base);
    ASSERT_EQ(search.best(), largest_fit(f.need, f.available, upper));
    ASSERT_LE(run.outcomes.size(), 24U);  // bisecting takes up to 25, and most of them fail
    ASSERT_LE(run.failures, 10);
  }
}

TEST(SizeSearch, NothingFitsMeansFinishedWithoutBest) {
  for (const Strategy strategy : {Strategy::predictive, Strategy::halving, Strategy::bisect}) {
    for (const Start start : {Start::at_upper, Start::probe}) {
      SizeSearch search({.strategy = strategy, .start = start, .upper = 1000, .lower = 3});
      std::int64_t last = 0;
      while (!search.finished()) {
        last = search.next();
        search.record(failure(last));
      }
      EXPECT_EQ(last, 3);
      EXPECT_EQ(search.best(), std::nullopt);
      EXPECT_EQ(search.smallest_failure(), 3);
      EXPECT_EQ(search.next(), 3);
    }
  }
}

TEST(SizeSearch, LargestPossibleSizesDoNotOverflow) {
  for (const Strategy strategy : {Strategy::predictive, Strategy::halving, Strategy::bisect}) {
    for (const std::int64_t quantum : {std::int64_t{1}, std::int64_t{32}, kHuge}) {
      for (const std::int64_t threshold : {std::int64_t{0}, std::int64_t{1}, kHuge - 1, kHuge}) {
        const SizeSearchOptions o{.strategy = strategy, .upper = kHuge, .quantum = quantum};
        SizeSearch search(o);
        while (!search.finished()) {
          ASSERT_LT(search.attempts(), bound_of_attempts(o));
          const std::int64_t size = search.next();
          ASSERT_GE(size, 1);
          search.record({.values = {size},
                         .outcome = outcome(size <= threshold),
                         .peak = kHuge,
                         .requested = kHuge,
                         .available = kHuge});
        }
        if (strategy != Strategy::halving) {
          EXPECT_EQ(search.best().value_or(0), largest_allowed(threshold, o));
        }
      }
    }
  }
}

// ---------------------------------------------------------------- halving and bisecting

TEST(SizeSearch, HalvingTriesTheSizesOfTorchMaxMem) {
  Random random(4);
  for (int i = 0; i < 3000; ++i) {
    const SizeSearchOptions o{.strategy = Strategy::halving,
                              .upper = random.magnitude(1, 1e6),
                              .quantum = random.coin() ? 1 : random.magnitude(1, 300)};
    const std::int64_t threshold = random.integer(0, 2) == 0 ? 0 : random.integer(0, o.upper);
    std::vector<std::int64_t>
        expected;  // `while max_value > 0: try; max_value = floor(max_value // 2, q)`
    for (std::int64_t x = o.upper; x > 0;) {
      expected.push_back(x);
      if (x <= threshold) {
        break;
      }
      x /= 2;
      x = x <= o.quantum ? x : (x / o.quantum) * o.quantum;
    }
    SizeSearch search(o);
    std::vector<std::int64_t> tried;
    while (!search.finished()) {
      tried.push_back(search.next());
      search.record(ended(tried.back(), tried.back() <= threshold));
    }
    ASSERT_EQ(tried, expected);
    ASSERT_EQ(search.best().value_or(0), expected.back() <= threshold ? expected.back() : 0);
  }
}

TEST(SizeSearch, HalvingEndsAtTheLowerBound) {
  SizeSearch search({.strategy = Strategy::halving, .upper = 100, .lower = 20});
  std::vector<std::int64_t> tried;
  while (!search.finished()) {
    tried.push_back(search.next());
    search.record(failure(tried.back()));
  }
  EXPECT_EQ(tried, (std::vector<std::int64_t>{100, 50, 25, 20}));
}

TEST(SizeSearch, BisectGoesToTheMiddleOfWhatIsLeft) {
  SizeSearch search({.strategy = Strategy::bisect, .upper = 100});
  std::vector<std::int64_t> tried;
  while (!search.finished()) {
    tried.push_back(search.next());
    search.record(ended(tried.back(), tried.back() <= 60));
  }
  EXPECT_EQ(tried, (std::vector<std::int64_t>{100, 50, 75, 62, 56, 59, 60, 61}));
}

// ---------------------------------------------------------------- numbers that are missing, absurd
// or contradict

TEST(SizeSearch, FailuresWithoutNumbersAreHalvedAndBisected) {
  SizeSearch search({.upper = 1000});
  std::vector<std::int64_t> tried;
  while (!search.finished()) {
    tried.push_back(search.next());
    search.record(ended(tried.back(), tried.back() <= 200));
  }
  EXPECT_EQ(std::vector<std::int64_t>(tried.begin(), tried.begin() + 4),
            (std::vector<std::int64_t>{1000, 500, 250, 125}));
  EXPECT_EQ(search.best(), 200);
}

TEST(SizeSearch, AdversarialNumbersCannotStallIt) {
  const std::vector<std::optional<std::int64_t>> values = {
      std::nullopt, -1, 0, 1, 1 << 20, std::int64_t{1} << 40, kHuge};
  for (const Start start : {Start::at_upper, Start::probe}) {
    for (const auto& peak : values) {
      for (const auto& requested : values) {
        for (const auto& available : values) {
          for (const std::int64_t threshold : {0, 1, 777'777, 1'000'000}) {
            const SizeSearchOptions o{.start = start, .upper = 1'000'000};
            SizeSearch search(o);
            while (!search.finished()) {
              ASSERT_LT(search.attempts(), bound_of_attempts(o));
              const std::int64_t size = search.next();
              search.record({.values = {size},
                             .outcome = outcome(size <= threshold),
                             .peak = peak,
                             .requested = requested,
                             .available = available});
            }
            if (start == Start::at_upper) {
              ASSERT_EQ(search.best().value_or(0), threshold);
            } else {
              ASSERT_EQ(search.best().has_value(), threshold > 0);
            }
          }
        }
      }
    }
  }
}

TEST(SizeSearch, ProbingEndsWithAnyPeaks) {
  Random random(6);
  for (int i = 0; i < 4000; ++i) {
    const SizeSearchOptions o = random_options(random, Strategy::predictive, Start::probe);
    const std::int64_t threshold = random.integer(0, o.upper + 1);
    SizeSearch search(o);
    std::int64_t largest_failure_below = kHuge;
    while (!search.finished()) {
      ASSERT_LT(search.attempts(), bound_of_attempts(o));
      const std::int64_t size = search.next();
      ASSERT_TRUE(allowed(size, o));
      ASSERT_LT(size, largest_failure_below);
      const bool fitted = size <= threshold;
      // Peaks that leave just enough room for the search to creep on.
      const double used = random.coin() ? 0.98 : random.real(0, 1);
      search.record({.values = {size},
                     .outcome = outcome(fitted),
                     .peak = static_cast<std::int64_t>(1e9 * used),
                     .requested = 900'000'000,
                     .available = 1'000'000'000});
      largest_failure_below = fitted ? largest_failure_below : size;
    }
    ASSERT_EQ(search.best().has_value(), threshold >= o.lower);
  }
}

TEST(SizeSearch, FailureThatItsBytesDoNotExplainIsHalved) {
  SizeSearch search({.upper = 1000});
  search.record({.values = {1000},
                 .outcome = outcome(false),
                 .peak = 0,
                 .requested = 1,
                 .available = 1'000'000'000});
  EXPECT_EQ(search.next(), 500);
}

TEST(SizeSearch, BytesOfAFirstFailureAreWorthAnAttemptOnlyWhereLittleWasMissing) {
  const auto next = [](std::int64_t needed) {
    SizeSearch search({.upper = 1000});
    search.record({.values = {1000},
                   .outcome = outcome(false),
                   .peak = 500'000,
                   .requested = needed - 500'000,
                   .available = 1'000'000});
    return search.next();
  };
  EXPECT_EQ(next(1'040'000), 730) << "the middle between half and 1000 / 1.04";
  EXPECT_EQ(next(1'400'000), 500);
}

TEST(SizeSearch, OneRequestThatIsTooLargeByItselfIsAnsweredByItsBound) {
  const auto next = [](std::int64_t held) {  // per item, besides 1600 bytes in one request
    SizeSearch search({.upper = 1000});
    for (int i = 0; i < 2; ++i) {
      const std::int64_t size = search.next();
      std::vector<AllocationEvent> log;
      if (held > 0) {
        log.push_back({.address = 1, .bytes = held * size, .operation = 0, .name = 1, .path = 1});
      }
      log.push_back({.address = 2,
                     .bytes = 1600 * size,
                     .operation = 1,
                     .name = 2,
                     .path = 2,
                     .refused = true});
      search.record({.values = {size},
                     .outcome = outcome(false),
                     .peak = held * size,
                     .requested = 1600 * size,
                     .available = 500'000,
                     .trace = i == 0 ? nullptr : trace_of(log, false)});
    }
    return search.next();
  };
  EXPECT_NEAR(static_cast<double>(next(10)), 500'000.0 / 1610 * 63 / 64, 1);
  EXPECT_NEAR(static_cast<double>(next(0)), 500'000.0 / 1600 * 63 / 64, 1);
}

TEST(SizeSearch, ProbingDoesNotCreep) {
  // Peaks that always leave room for one or two percent more, and never lie on a line.
  Random random(11);
  for (int i = 0; i < 1000; ++i) {
    const SizeSearchOptions o{.start = Start::probe, .upper = random.magnitude(1e4, 1e9)};
    SizeSearch search(o);
    while (!search.finished()) {
      ASSERT_LT(search.attempts(), bound_of_attempts(o));
      search.record({.values = {search.next()},
                     .peak = random.integer(975'000'000, 985'000'000),
                     .available = 1'000'000'000});
    }
  }
}

TEST(SizeSearch, NewestOutcomeCountsWhereTwoContradict) {
  SizeSearch search({.upper = 1000});
  search.record(fit(600));
  search.record(failure(500));
  EXPECT_EQ(search.best(), std::nullopt);
  EXPECT_EQ(search.smallest_failure(), 500);
  search.record(fit(800));
  EXPECT_EQ(search.best(), 800);
  EXPECT_EQ(search.smallest_failure(), std::nullopt);
}

TEST(SizeSearch, FailureDespiteRoomStillShrinks) {
  // The limit promises 10 % more than there is (another process, fragments).
  const std::int64_t promised = 1000 * kMiB;
  const std::int64_t real = 900 * kMiB;
  SizeSearch search({.upper = 100'000});
  for (;;) {
    const std::int64_t need = search.next() * kMiB;
    const bool fitted = need <= real;
    search.record({.values = {search.next()},
                   .outcome = outcome(fitted),
                   .peak = fitted ? need : 0,
                   .requested = need,
                   .available = promised});
    if (fitted) {
      break;
    }
    ASSERT_LT(search.attempts(), 9);
  }
  EXPECT_GE(*search.best(), 781);  // halving's size
}

// ---------------------------------------------------------------- remembered facts

const Curve kRemembered = [](std::int64_t s) {
  return 100 * kMiB + s * kMiB;
};  // 900 fit in 1000 MiB

SizeSearch with_memory(std::int64_t upper, std::int64_t then, std::int64_t now,
                       const std::vector<std::int64_t>& sizes) {
  SizeSearch search({.upper = upper, .circumstances = {.available = now}});
  for (const std::int64_t size : sizes) {
    search.remember(attempt(kRemembered, size, then, 100 * kMiB));
  }
  return search;
}

TEST(SizeSearch, RememberedFitsStartAtThePredictedMaximum) {
  const SizeSearch search =
      with_memory(100'000, 1000 * kMiB, 1000 * kMiB, {100'000, 800, 850, 880});
  EXPECT_GE(search.next(), 885);
  EXPECT_LE(search.next(), 900);
}

TEST(SizeSearch, ARememberedFailureThatTheNeedExplainsDoesNotHoldItBack) {
  const SizeSearch search = with_memory(100'000, 1000 * kMiB, 1000 * kMiB, {1200, 400, 500});
  EXPECT_GE(search.next(), 880);
  EXPECT_LE(search.next(), 900);
}

TEST(SizeSearch, MoreMemoryLiftsARememberedFailure) {
  SizeSearch search =
      with_memory(100'000, 1000 * kMiB, 2000 * kMiB, {100'000, 1000, 880, 800, 600});
  EXPECT_EQ(search.smallest_failure(), 100'000);  // it needs more than there is now, 1000 does not
  EXPECT_EQ(search.best(), 880);
  EXPECT_GE(search.next(), 1860);
  EXPECT_LE(search.next(), 1900);
}

TEST(SizeSearch, LessMemoryUnbindsARememberedFit) {
  SizeSearch search = with_memory(100'000, 1000 * kMiB, 500 * kMiB, {100'000, 1000, 880, 800, 200});
  EXPECT_EQ(search.best(), 200);
  EXPECT_EQ(search.smallest_failure(), 1000);
  EXPECT_GE(search.next(), 380);
  EXPECT_LE(search.next(), 400);
}

TEST(SizeSearch, RememberedFailuresAloneStartBelowThem) {
  const SizeSearch search = with_memory(100'000, 1000 * kMiB, 1000 * kMiB, {100'000, 1200});
  EXPECT_GE(search.next(), 781);  // as halving
  EXPECT_LT(search.next(), 1200);
}

TEST(SizeSearch, RememberedBoundsThatMeetFinishTheSearch) {
  const SizeSearch search = with_memory(1000, 1000 * kMiB, 1000 * kMiB, {901, 900});
  EXPECT_TRUE(search.finished());
  EXPECT_EQ(search.next(), 900);
}

TEST(SizeSearch, RememberedSizesWithoutBytesAreWhereItStarts) {
  for (const Strategy strategy : {Strategy::predictive, Strategy::halving, Strategy::bisect}) {
    SizeSearch search({.strategy = strategy, .upper = 1000});
    search.remember(failure(1000));
    search.remember(fit(250));
    EXPECT_EQ(search.next(), 250);
    EXPECT_FALSE(search.finished());
    search.record(failure(250));
    EXPECT_LT(search.next(), 250);  // what happens now outweighs it
  }
}

TEST(SizeSearch, ARememberedFailureAloneIsFollowedByTheNextSizeOfTheStrategy) {
  const auto next = [](Strategy strategy) {
    SizeSearch search({.strategy = strategy, .upper = 1000, .lower = 300});
    search.remember(failure(800));
    return search.next();
  };
  EXPECT_EQ(next(Strategy::halving), 400);
  EXPECT_EQ(next(Strategy::bisect), (299 + 799) / 2);
}

TEST(SizeSearch, ARememberedFailureOfWhichNothingIsKnownIsABound) {
  SizeSearch search({.upper = 1000, .circumstances = {.available = 1000}});
  search.remember(failure(500));
  EXPECT_EQ(search.smallest_failure(), 500);
}

TEST(SizeSearch, ARememberedFitIsNoBoundIfItsBytesAreMoreThanAreAvailable) {
  const auto best = [](std::int64_t available) {
    SizeSearch search({.upper = 1000, .circumstances = {.available = available}});
    search.remember({.values = {600}, .peak = 2000});
    return search.best();
  };
  EXPECT_EQ(best(1999), std::nullopt);
  EXPECT_EQ(best(2000), 600);
}

TEST(SizeSearch, ARememberedFitWithoutBytesIsABoundUntilClearlyLessIsAvailable) {
  const auto best = [](std::int64_t available) {
    SizeSearch search({.upper = 1000, .circumstances = {.available = available}});
    search.remember({.values = {600}, .available = 1000});
    return search.best();
  };
  EXPECT_EQ(best(950), 600);
  EXPECT_EQ(best(500), std::nullopt);
}

TEST(SizeSearch, WhereNothingIsExpectedToFitItBeginsWithTheLastFitAndNotWithTheSmallestSize) {
  // Calls need 100 MiB whatever their size: if 50 MiB suffice, this one is of another kind.
  EXPECT_EQ(with_memory(100'000, 1000 * kMiB, 50 * kMiB, {800, 880}).next(), 880);
}

TEST(SizeSearch, RememberedFactsOfOtherAvailableBytesNeverPreventTheExactMaximum) {
  Random random(10);
  for (int i = 0; i < 3000; ++i) {
    const Affine f = random_affine(random, 512, 1e8);
    const std::int64_t upper = f.most * random.integer(1, 20);
    SizeSearch search({.upper = upper, .circumstances = {.available = f.available}});
    for (std::int64_t fact = random.integer(0, 40); fact > 0; --fact) {  // more than are kept
      const auto then =
          static_cast<std::int64_t>(static_cast<double>(f.available) * random.real(0.3, 3));
      search.remember(attempt(f.need, random.integer(1, upper), then, std::min(f.base, then)));
    }
    const Attempts run = until_finished(search, f.need, f.available, f.base);
    ASSERT_EQ(search.best(), largest_fit(f.need, f.available, upper));
    ASSERT_LE(run.outcomes.size(), 40U);
  }
}

// Traces of 15 and 16 items show a need that hardly grows, but 17 are padded to 32.
TEST(SizeSearch, APeakAloneIsNotTriedOnAModelOfTheAllocator) {
  int asked = 0;
  SizeSearch search(
      {.upper = 64, .circumstances = {.available = 1000 * kMiB, .packs = false, .allocator = [&] {
                                        ++asked;
                                        return std::optional<AllocatorModel>();
                                      }}});
  for (const std::int64_t size : {8, 16}) {
    Attempt attempt = fit(size);
    attempt.peak = 10 * kMiB * size;
    attempt.available = 1000 * kMiB;
    search.remember(attempt);
  }
  EXPECT_GT(search.next(), 16) << "the need is followed";
  EXPECT_EQ(asked, 0);
}

TEST(SizeSearch, RecordedRequestsAreAddedUpWhereTheDeviceDoesNotTellOfItsAllocator) {
  for (const bool has_function : {false, true}) {
    Circumstances now{.available = 1000 * kMiB, .packs = false};
    if (has_function) {
      now.allocator = [] { return std::optional<AllocatorModel>(); };
    }
    SizeSearch search({.upper = 64, .circumstances = now});
    for (const std::int64_t size : {8, 16}) {
      Attempt attempt = fit(size);
      attempt.peak = 10 * kMiB * size;
      attempt.available = 1000 * kMiB;
      const std::vector<AllocationEvent> events{
          {.address = 1, .bytes = *attempt.peak, .operation = 0, .name = 1, .path = 1},
          {.address = 1, .bytes = *attempt.peak, .freed = true}};
      attempt.trace = trace_of(events);
      search.remember(attempt);
    }
    EXPECT_GT(search.next(), 16) << "the need is followed";
  }
}

TEST(SizeSearch, FollowsNoTracesThatFailuresContradict) {
  constexpr std::int64_t kAvailable = 80 * kMiB;
  const auto attempt = [&](std::int64_t size) {
    const std::int64_t padded = (size + 15) / 16 * 64 * kMiB;
    const bool fits = padded + size * kMiB / 8 <= kAvailable;
    std::vector<AllocationEvent> events{
        {.address = 1, .bytes = padded, .operation = 0, .name = 1, .refused = !fits}};
    if (fits) {
      events.push_back({.address = 2, .bytes = size * kMiB / 8, .operation = 1, .name = 2});
      events.push_back({.address = 2, .freed = true});
      events.push_back({.address = 1, .freed = true});
    }
    Attempt result = ended(size, fits);
    result.available = kAvailable;
    result.peak = fits ? padded + size * kMiB / 8 : 0;
    result.trace = trace_of(events, fits);
    if (!fits) {
      result.requested = padded;
    }
    return result;
  };
  std::vector<Attempt> known{attempt(32), attempt(16), attempt(15)};
  int failures = 0;
  for (int i = 0; i < 8; ++i) {
    SizeSearch search({.upper = 32, .circumstances = {.available = kAvailable}});
    search.remember(known);
    for (add_attempt(known, attempt(search.next())); !known.back().fitted(); ++failures) {
      known.back().expected = search.expected();
      search.record(known.back());
      add_attempt(known, attempt(search.next()));
    }
  }
  EXPECT_LE(failures, 2);
}

// Lighter calls have left many fits close to each other. Then comes one that needs more.
TEST(SizeSearch, HeavierCallFailsAtMostOnceMoreThanHalvingAndDoesNotEndBelowIt) {
  Random random(11);
  for (int i = 0; i < 4000; ++i) {
    const Affine f = random_affine(random, 512, 1e8);
    const std::int64_t upper = f.most * random.integer(1, 8);
    const Shows shows = random.coin() ? Shows::trace : Shows::peak;
    const double heavier = random.log_uniform(1, 8);
    const Curve lighter = [&](std::int64_t size) {
      return static_cast<std::int64_t>(static_cast<double>(f.need(size)) / heavier);
    };
    SizeSearch search({.upper = upper, .circumstances = {.available = f.available}});
    const std::int64_t near = random.integer(1, std::min(upper, f.most * 2));
    for (std::int64_t fact = random.integer(1, 12); fact > 0; --fact) {
      const std::int64_t size = std::max<std::int64_t>(near - random.integer(0, 20), 1);
      search.remember(attempt(lighter, size, f.available, 0, shows));
    }
    const std::int64_t first = search.next();
    const Attempts run = until_fit(search, f.need, f.available, f.base, shows);
    int halvings = 0;
    std::int64_t size = first;
    for (; size > 1 && f.need(size) > f.available; ++halvings) {
      size /= 2;
    }
    ASSERT_LE(run.failures, halvings + 1) << "case " << i << " from " << first;
    if (f.need(size) <= f.available) {
      ASSERT_GE(run.outcomes.back().size(), size) << "case " << i << " from " << first;
    }
  }
}

// Steps of a quantum that fitted lie side by side below a failure.
TEST(SizeSearch, HeavierCallDoesNotTryRememberedFitsOneAfterTheOther) {
  const Curve heavy = [](std::int64_t size) { return 2 * kRemembered(size); };
  SizeSearch search({.upper = 4096, .quantum = 8, .circumstances = {.available = 1000 * kMiB}});
  for (const std::int64_t size : {904, 872, 880, 888, 896}) {
    search.remember(attempt(kRemembered, size, 1000 * kMiB, 100 * kMiB));
  }
  const Attempts run = until_fit(search, heavy, 1000 * kMiB);
  EXPECT_LE(run.failures, 3);  // halving: 896, 448
  EXPECT_GE(run.outcomes.back().size(), 224);
}

TEST(SizeSearch, PaddedSizesDoNotEndBelowHalving) {
  const Curve padded = [](std::int64_t size) {
    return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(size))) * 16384;
  };
  for (const std::int64_t available : {4 * kMiB + 100'000, 5 * kMiB, 7 * kMiB}) {
    SizeSearch search({.upper = 4096, .circumstances = {.available = available}});
    EXPECT_GE(until_fit(search, padded, available).outcomes.back().size(), 256);
  }
}

TEST(SizeSearch, FitStaysWhereItsBytesFitInSlightlyLessMemory) {
  for (const Shows shows : {Shows::trace, Shows::peak}) {
    for (const int unforeseen : {0, 2}) {
      SizeSearch search(
          {.upper = 1000, .circumstances = {.available = 995 * kMiB, .packs = false}});
      for (int i = 0; i < unforeseen; ++i) {
        Attempt failed = attempt(kRemembered, 910 + i, 1000 * kMiB, 0, shows);
        failed.expected = 900 * kMiB;
        search.remember(failed);
      }
      search.remember(attempt(kRemembered, 890, 1000 * kMiB, 0, shows));  // needs 990 MiB
      EXPECT_GE(search.next(), 890) << unforeseen;
    }
  }
}

TEST(SizeSearch, UnforeseenFailuresAreForgivenWhenMoreIsFree) {
  const auto next = [](std::int64_t available) {
    SizeSearch search({.upper = 10'000, .circumstances = {.available = available}});
    for (const std::int64_t size : {920, 910}) {
      Attempt failed = attempt(kRemembered, size, 1000 * kMiB, 100 * kMiB);
      failed.expected = 900 * kMiB;
      search.remember(failed);
    }
    for (const std::int64_t size : {500, 600}) {
      search.remember(attempt(kRemembered, size, 1000 * kMiB, 100 * kMiB));
    }
    return search.next();
  };
  EXPECT_EQ(next(1000 * kMiB), 600);
  EXPECT_GE(next(3000 * kMiB), 2700);
}

TEST(SizeSearch, FitBelowTheLowerBoundLeadsToTheLowerBound) {
  SizeSearch search(
      {.upper = 1000, .lower = 64, .circumstances = {.available = 100 * kMiB}, .cautious = true});
  search.remember(attempt(kRemembered, 8, 1000 * kMiB));
  EXPECT_GE(search.next(), 64);
}

TEST(SizeSearch, TracedSearchOfAttemptsWithoutBytesEnds) {
  SizeSearch search({.start = Start::traced, .upper = 1000});
  while (!search.finished()) {
    ASSERT_LT(search.attempts(), 40);
    search.record(ended(search.next(), search.next() <= 300));
  }
  EXPECT_EQ(search.best(), 300);
}

TEST(SizeSearch, LargestPossibleUpperBoundIsNoTrouble) {
  SizeSearch search(
      {.upper = kHuge, .circumstances = {.available = 1000 * kMiB}, .cautious = true});
  for (const std::int64_t size : {100, 101}) {
    search.remember(attempt(kRemembered, size, 1000 * kMiB, 100 * kMiB));
  }
  EXPECT_GE(search.next(), 101);
  EXPECT_LE(search.next(), 900);
}

}  // namespace
}  // namespace brim
