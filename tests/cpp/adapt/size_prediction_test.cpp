// What the search makes of bytes: how few failures, and how near to the largest size, in simulated
// memory.

#include <brim/need/size_search.h>
#include <brim/predict/allocation_record.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "adapt/detail/attempt_monitor.h"
#include "adapt/memory_simulation.h"

namespace brim {
namespace {

using namespace simulation;

// ---------------------------------------------------------------- predicting from failures

TEST(SizeSearch, AffineNeedFitsAfterFewFailuresAndTheThirdCallIsNearTheMaximum) {
  Random random(5);
  for (const std::int64_t granule : {std::int64_t{64}, std::int64_t{512}, 2 * kMiB}) {
    for (int i = 0; i < 3000; ++i) {
      const Affine f = random_affine(random, granule, granule > 512 ? 1e9 : 1e8);
      const std::int64_t upper =
          static_cast<std::int64_t>(static_cast<double>(f.most) * random.real(0.8, 50));
      const std::int64_t most = largest_fit(f.need, f.available, upper);
      std::vector<Attempt> memory;
      for (int call = 0; call < 3; ++call) {
        SizeSearch search({.upper = upper, .packs = granule < kMiB, .available = f.available});
        search.remember(memory);
        const Attempts run = until_fit(search, f.need, f.available, f.base);
        memory.insert(memory.end(), run.outcomes.begin(), run.outcomes.end());
        ASSERT_LE(run.failures, call == 0 ? 3 : 0)
            << "call " << call << " upper " << upper << " of " << most;
      }
      const double near = granule < kMiB ? 0.97 : 0.92;
      ASSERT_GE(memory.back().size() + 1,
                static_cast<std::int64_t>(near * static_cast<double>(most)));
    }
  }
}

TEST(SizeSearch, ProportionalNeedFitsAfterTwoFailures) {
  // One failure does not show how the need grows.
  const Need need = [](std::int64_t s) { return s * 4096; };
  SizeSearch search({.upper = 1'000'000});
  const Attempts run = until_fit(search, need, 4096 * 15112);
  EXPECT_EQ(run.failures, 2);
  EXPECT_GE(run.outcomes.back().size(), 14800);
}

TEST(SizeSearch, NearestNeighboursOnAGpuFitAfterTwoFailures) {
  // Measured on an H200: distances of `size` x 65536 floats, then a workspace of 32 MiB to sort.
  constexpr double kAcceleratorMargin = 0.02;
  const std::int64_t available = 4081 * kMiB + 700 * 1024;
  SizeSearch search({.upper = 32768, .margin = kAcceleratorMargin});
  search.record({.values = {search.next()},
                 .outcome = outcome(false),
                 .peak = 24 * kMiB + 768 * 1024,
                 .requested = 8192 * kMiB,
                 .available = available});
  ASSERT_EQ(search.next(), 16384);  // which halving would try, and may fit for all that is known
  search.record({.values = {search.next()},
                 .outcome = outcome(false),
                 .peak = 24 * kMiB + 768 * 1024,
                 .requested = 4096 * kMiB,
                 .available = available});
  EXPECT_NEAR(static_cast<double>(search.next()), 15903, 5);  // which fitted
  // With slightly more, the sort fails. By the bytes it seems to fit. It is not tried again with an
  // empty cache all the same.
  const std::int64_t distances = 16196 * kMiB / 4;
  EXPECT_FALSE(should_have_fitted({.requested = 32 * kMiB, .in_use = distances}, available));
  EXPECT_TRUE(should_have_fitted({.requested = 24 * kMiB, .in_use = distances}, available));
}

TEST(SizeSearch, FailureThatMovedToALaterPlaceIsReadAnew) {
  // At the upper bound the first tensor does not fit, later the second, of the same size: the two
  // failures are no line.
  const std::int64_t available = 8000 * kMiB;
  SizeSearch search({.upper = 100'000});
  int failures = 0;
  std::int64_t size = 0;
  for (;; ++failures) {
    size = search.next();
    const std::int64_t one = size * kMiB / 4;
    const bool first = one > available;
    const bool fitted = 2 * one <= available;
    search.record({.values = {size},
                   .outcome = outcome(fitted),
                   .peak = fitted  ? 2 * one
                           : first ? 0
                                   : one,
                   .requested = one,
                   .available = available});
    if (fitted) {
      break;
    }
  }
  EXPECT_EQ(failures, 3);   // as many as halving, which ends at 12500
  EXPECT_GE(size, 15'520);  // 97 % of 16000
}

// Batch normalization raises an error for one item.
TEST(SizeSearch, NeverTriesASingleItemToLearnFrom) {
  constexpr std::int64_t kAvailable = 5120 * kMiB;
  const Need need = [](std::int64_t size) { return size * 1920 * kMiB; };
  const auto next_after_two = [&](const Attempt& two, bool packs) {
    SizeSearch search({.upper = 4,
                       .packs = packs,
                       .allocator = [] { return AllocatorModel({.capacity = kAvailable}); },
                       .available = kAvailable});
    search.remember(std::vector{attempt(need, 4, kAvailable), two});
    return search.next();
  };
  Attempt two = attempt(need, 2, kAvailable);
  EXPECT_EQ(next_after_two(two, true), 2);
  EXPECT_EQ(next_after_two(two, false), 2);
  const std::vector<AllocationEvent> events{{.address = 1, .bytes = need(2)},
                                            {.address = 1, .freed = true}};
  two.record = record_of(events);
  EXPECT_EQ(next_after_two(two, true), 2);
  EXPECT_EQ(next_after_two(two, false), 2) << "replayed";
}

struct SeveralRequests {
  double largest_constant;  // share of the available bytes
  double failures;          // on average, at most
  double near;              // share of the cases whose first fit is at least 97 % of the maximum
};

class RequestsOneAfterTheOther : public ::testing::TestWithParam<SeveralRequests> {};

TEST_P(RequestsOneAfterTheOther, AreFoundOneByOneAndTheThirdCallIsNearTheMaximum) {
  // Up to three tensors, all kept: a smaller size fails at a later one, and no failure tells of the
  // tensors to come.
  Random random(12);
  const double available = 8e9;
  const int cases = 4000;
  int failures = 0;
  int near = 0;
  int near_at_last = 0;
  for (int i = 0; i < cases; ++i) {
    const double constant = random.real(0, GetParam().largest_constant) * available;
    const auto most = static_cast<double>(random.magnitude(256, 1e6));
    std::vector<double> slopes(static_cast<std::size_t>(random.integer(1, 3)));
    double sum = 0;
    for (double& slope : slopes) {
      slope = random.real(0.05, 1);
      sum += slope;
    }
    const auto run = [&](std::int64_t size) {
      Attempt attempt{.values = {size}, .available = static_cast<std::int64_t>(available)};
      double held = constant;
      for (const double slope : slopes) {
        const double request =
            slope / sum * (available - constant) / most * static_cast<double>(size);
        if (held + request > available) {
          attempt.outcome = OomKind::device_memory;
          attempt.requested = static_cast<std::int64_t>(request);
          break;
        }
        held += request;
      }
      attempt.peak = static_cast<std::int64_t>(held);
      return attempt;
    };
    const auto upper = static_cast<std::int64_t>(most * random.real(1.01, 30));
    std::vector<Attempt> memory;
    for (int call = 0; call < 3; ++call) {
      SizeSearch search({.upper = upper, .available = static_cast<std::int64_t>(available)});
      for (const Attempt& outcome : memory) {
        search.remember(outcome);
      }
      do {
        memory.push_back(run(search.next()));
        search.record(memory.back());
        failures += memory.back().fitted() || call > 0 ? 0 : 1;
      } while (!memory.back().fitted());
      near +=
          call == 0 && static_cast<double>(memory.back().size()) >= 0.97 * std::floor(most) ? 1 : 0;
    }
    near_at_last += static_cast<double>(memory.back().size()) >= 0.97 * std::floor(most) ? 1 : 0;
  }
  EXPECT_LE(failures, GetParam().failures * cases) << "average " << failures / double{cases};
  EXPECT_GE(near, GetParam().near * cases) << "share " << near / double{cases};
  EXPECT_GE(near_at_last, 0.99 * cases) << "share " << near_at_last / double{cases};
}

INSTANTIATE_TEST_SUITE_P(SizeSearch, RequestsOneAfterTheOther,
                         ::testing::Values(SeveralRequests{0.0, 3.2, 0.5},
                                           SeveralRequests{0.05, 3.3, 0.48}));

// ---------------------------------------------------------------- beside halving

// A program: tensors that it makes one after the other and keeps. The last one is not the whole
// need, so a failure shows a part of it only.
struct Program {
  const char* name;
  std::function<double(double)> need;  // share of the available bytes, by size / largest fit
  double end = 1;  // at least this share of halving's size; coarse steps hide how the need grows
};

class BesideHalving : public ::testing::TestWithParam<Program> {};

TEST_P(BesideHalving, FailsAtMostOnceMoreAndEndsNoLower) {
  Random random(77);
  const int cases = 2000;
  for (int i = 0; i < cases; ++i) {
    const auto available = static_cast<double>(random.magnitude(1e8, 8e10));
    const auto most = static_cast<double>(random.magnitude(64, 1e6));
    const double constant = random.real(0, 0.5) * available;
    std::vector<double> parts(static_cast<std::size_t>(random.integer(1, 6)));
    std::generate(parts.begin(), parts.end(), [&] { return random.real(0.05, 1); });
    const double sum = std::accumulate(parts.begin(), parts.end(), 0.0);
    const auto run = [&](std::int64_t tried) {
      const double all =
          (available - constant) * GetParam().need(static_cast<double>(tried) / most);
      double held = constant;
      for (const double part : parts) {
        if (const double request = all * part / sum; held + request > available) {
          return Attempt{.values = {tried},
                         .outcome = outcome(false),
                         .peak = static_cast<std::int64_t>(held),
                         .requested = static_cast<std::int64_t>(request),
                         .available = static_cast<std::int64_t>(available)};
        } else {
          held += request;
        }
      }
      return Attempt{.values = {tried},
                     .peak = static_cast<std::int64_t>(held),
                     .available = static_cast<std::int64_t>(available)};
    };
    const auto upper = static_cast<std::int64_t>(most * random.real(1.01, 60)) + 1;
    const auto tries = [&](Strategy strategy) {
      SizeSearch search({.strategy = strategy, .upper = upper});
      int failed = 0;
      for (Attempt tried = run(search.next()); !tried.fitted(); tried = run(search.next())) {
        search.record(tried);
        ++failed;
      }
      return std::pair(failed, static_cast<double>(search.next()) / most);
    };
    const auto [failures, size] = tries(Strategy::predictive);
    const auto [halvings, halved] = tries(Strategy::halving);
    ASSERT_LE(failures, halvings + 1);
    ASSERT_GE(size, GetParam().end * halved);
  }
}

INSTANTIATE_TEST_SUITE_P(
    SizeSearch, BesideHalving,
    ::testing::Values(
        Program{"affine", [](double x) { return x; }},
        Program{"quadratic", [](double x) { return x * x; }},
        Program{"concave", [](double x) { return std::pow(x, 0.7); }},
        Program{"stepped", [](double x) { return std::ceil(x * 9) / 9; }, 0.88},
        Program{"plateau", [](double x) { return x < 0.5 ? 0.6 : 0.2 + 0.8 * x; }},
        Program{"workspace", [](double x) { return 0.7 * x + (x > 0.4 ? 0.3 : 0.0); }},
        Program{"doubling", [](double x) { return std::exp2(std::ceil(std::log2(x))); }, 0.45}),
    [](const auto& setting) { return std::string(setting.param.name); });

TEST(SizeSearch, ProbingLeavesTinySizes) {
  // From 1 the cautious prediction is 1.4: without a step on trial it would stay at a tenth of what
  // fits.
  const Need need = [](std::int64_t s) { return 500 + 50 * s; };
  SizeSearch search({.start = Start::probe, .upper = 10});
  const Attempts run = until_finished(search, need, 1000);
  EXPECT_EQ(run.failures, 0);
  EXPECT_GE(*search.best(), 9);
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

// ---------------------------------------------------------------- probing

TEST(SizeSearch, ProbingAnAffineNeedNeverFailsAndReachesNearlyTheMaximum) {
  Random random(7);
  for (int i = 0; i < 6000; ++i) {
    const Affine f = random_affine(random, 512, 1e8);
    const std::int64_t upper =
        static_cast<std::int64_t>(static_cast<double>(f.most) * random.real(0.3, 60));
    const std::int64_t most = largest_fit(f.need, f.available, upper);
    SizeSearch search({.start = Start::probe, .upper = upper});
    const Attempts run = until_finished(search, f.need, f.available, f.base);
    ASSERT_EQ(run.failures, 0) << "upper " << upper << " of " << most;
    const std::size_t fourth = std::min<std::size_t>(4, run.outcomes.size()) - 1;
    ASSERT_GE(share(run.outcomes[fourth].size(), most), 0.95)
        << "upper " << upper << " of " << most;
    ASSERT_GE(share(*search.best(), most), 0.98);
    ASSERT_LE(run.outcomes.size(), 7U);
  }
}

struct Kind {
  const char* name;
  std::function<double(double)> curve;  // from 0 to 1 over the sizes up to the largest fit
  std::int64_t granule;
  double without_failure;  // at least this share of the cases
  double end;              // reached at least, in 99 % of the cases
  double least = 1e9;      // available bytes
  double most = 8e10;
};

class ProbingHarderNeeds : public ::testing::TestWithParam<Kind> {};

TEST_P(ProbingHarderNeeds, RarelyFailsAndComesClose) {
  const Kind& kind = GetParam();
  Random random(8);
  const int cases = 3000;
  int clean = 0;
  int close = 0;
  for (int i = 0; i < cases; ++i) {
    const double available = static_cast<double>(random.magnitude(kind.least, kind.most));
    const double constant = random.real(0, 0.5);
    const double scale = static_cast<double>(random.magnitude(256, 1e6));
    const Need need = [&](std::int64_t s) {
      const double x = kind.curve(static_cast<double>(s) / scale);
      const auto bytes = static_cast<std::int64_t>(available * (constant + (1 - constant) * x));
      return (bytes + kind.granule - 1) / kind.granule * kind.granule;
    };
    const auto bytes = static_cast<std::int64_t>(available);
    const auto upper = static_cast<std::int64_t>(scale * random.real(0.5, 50));
    const std::int64_t most = largest_fit(need, bytes, upper);
    SizeSearch search({.start = Start::probe, .upper = upper});
    const Attempts run = until_finished(search, need, bytes);
    ASSERT_LE(run.failures, 3);
    ASSERT_LE(run.outcomes.size(), 20U);
    clean += run.failures == 0 ? 1 : 0;
    close += share(search.best().value_or(0), most) >= kind.end ? 1 : 0;
  }
  EXPECT_GE(clean, kind.without_failure * cases) << clean;
  EXPECT_GE(close, 0.99 * cases);
}

INSTANTIATE_TEST_SUITE_P(
    SizeSearch, ProbingHarderNeeds,
    ::testing::Values(
        Kind{"coarse", [](double x) { return x; }, 2 * kMiB, 1.0, 0.98},
        Kind{"coarse_beside_little", [](double x) { return x; }, 2 * kMiB, 0.99, 0.85, 1e8, 1e9},
        Kind{"quadratic", [](double x) { return x * x; }, 512, 0.995, 0.98},
        Kind{"quadratic_coarse", [](double x) { return x * x; }, 2 * kMiB, 0.97, 0.93},
        Kind{"concave", [](double x) { return std::pow(x, 0.8); }, 512, 0.99, 0.95}),
    [](const auto& setting) { return std::string(setting.param.name); });

TEST(SizeSearch, ProbingSurvivesAnotherKernelAtSmallSizes) {
  // Below 25 no temporaries are needed: what tiny probes show is too little by far.
  Random random(9);
  int clean = 0;
  const int cases = 3000;
  for (int i = 0; i < cases; ++i) {
    const std::int64_t most = random.magnitude(256, 1e5);
    const std::int64_t available = most * 12 * kMiB;
    const std::int64_t constant = random.integer(0, available / 3);
    const Need need = [&](std::int64_t s) {
      return s < 25 ? s * 4 * kMiB : constant + s * 12 * kMiB;
    };
    const std::int64_t upper = most * random.integer(1, 30);
    SizeSearch search({.start = Start::probe, .upper = upper});
    const Attempts run = until_finished(search, need, available);
    ASSERT_LE(run.failures, 2);
    ASSERT_GE(share(*search.best(), largest_fit(need, available, upper)), 0.85);
    clean += run.failures == 0 ? 1 : 0;
  }
  EXPECT_GE(clean, 0.97 * cases);
}

TEST(SizeSearch, ProbingStartsSmallAndGrowsAtMostSixteenfoldUnconfirmed) {
  SizeSearch search({.start = Start::probe, .upper = 6400});
  EXPECT_EQ(search.next(), 100);
  search.record({.values = {100}, .peak = 0, .available = 1'000'000'000});
  EXPECT_EQ(search.next(), 1600);
}

TEST(SizeSearch, ProbingShrinksBeforeItFailsWhenLessIsLeft) {
  // Results that pile up: each part leaves bytes behind, so the step that fitted will not fit for
  // ever.
  const Need need = [](std::int64_t s) { return s * kMiB; };
  SizeSearch search({.start = Start::probe, .upper = 4000});
  std::int64_t held = 0;
  std::int64_t smallest_use = kHuge;
  for (int part = 0; part < 300; ++part) {
    const std::int64_t available = 1000 * kMiB - held;
    const Attempt tried = attempt(need, search.next(), available);
    EXPECT_TRUE(tried.fitted()) << part;
    if (part > 10) {
      smallest_use = std::min(smallest_use, 100 * need(tried.size()) / available);
    }
    search.record(tried);
    held += 2 * kMiB;
  }
  EXPECT_GE(smallest_use, 93);
}

TEST(SizeSearch, SettledProbingStaysAtItsSize) {
  const Need need = [](std::int64_t s) { return 1000 + s * 100; };
  SizeSearch search({.start = Start::probe, .upper = 100'000});
  until_finished(search, need, 1'000'000);
  const std::int64_t settled = search.next();
  for (int part = 0; part < 100; ++part) {
    search.record(attempt(need, settled, 1'000'000));
    ASSERT_EQ(search.next(), settled);
    ASSERT_TRUE(search.finished());
  }
  search.record(attempt(need, 17, 1'000'000));  // the shorter last part
  EXPECT_EQ(search.best(), settled);
}

// ---------------------------------------------------------------- remembered facts

const Need kRemembered = [](std::int64_t s) {
  return 100 * kMiB + s * kMiB;
};  // 900 fit in 1000 MiB

SizeSearch with_memory(std::int64_t upper, std::int64_t then, std::int64_t now,
                       const std::vector<std::int64_t>& sizes, Start start = Start::at_upper) {
  SizeSearch search({.start = start, .upper = upper, .available = now});
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

TEST(SizeSearch, RememberedFitsOfAProbeStartThereToo) {
  const SizeSearch search =
      with_memory(100'000, 1000 * kMiB, 1000 * kMiB, {100, 300, 880}, Start::probe);
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
  EXPECT_EQ(search.best(), std::nullopt);
  EXPECT_EQ(search.smallest_failure(), 1000);
  EXPECT_GE(search.next(), 380);
  EXPECT_LE(search.next(), 400);
}

TEST(SizeSearch, RememberedFailuresAloneStartBelowThem) {
  const SizeSearch search = with_memory(100'000, 1000 * kMiB, 1000 * kMiB, {100'000, 1200});
  EXPECT_GE(search.next(), 873);
  EXPECT_LE(search.next(), 900);
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

TEST(SizeSearch, RememberedFactsOfOtherAvailableBytesNeverPreventTheExactMaximum) {
  Random random(10);
  for (int i = 0; i < 3000; ++i) {
    const Affine f = random_affine(random, 512, 1e8);
    const std::int64_t upper = f.most * random.integer(1, 20);
    SizeSearch search({.upper = upper, .available = f.available});
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

}  // namespace
}  // namespace brim
