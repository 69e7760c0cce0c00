// Work in parts: the search begins small and grows, and should not fail.

#include <brim/need/size_search.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "need/memory_simulation.h"

namespace brim {
namespace {

using namespace simulation;

TEST(Probing, AnAffineNeedNeverFailsAndReachesNearlyTheMaximum) {
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
    ASSERT_GE(share(run.outcomes[fourth].size(), most), 0.9) << "upper " << upper << " of " << most;
    ASSERT_GE(share(*search.best(), most), 0.96);
    ASSERT_LE(run.outcomes.size(), 7U);
  }
}

struct HarderNeed {
  const char* name;
  std::function<double(double)> curve;  // from 0 to 1 over the sizes up to the largest fit
  std::int64_t granule;
  double without_failure;  // at least this share of the cases
  double end;              // reached at least, in 99 % of the cases
  double least = 1e9;      // available bytes
  double most = 8e10;
};

void probe_harder_need(const HarderNeed& kind, Shows shows) {
  Random random(8);
  const int cases = 3000;
  int clean = 0;
  int close = 0;
  for (int i = 0; i < cases; ++i) {
    const double available = static_cast<double>(random.magnitude(kind.least, kind.most));
    const double constant = random.real(0, 0.5);
    const double scale = static_cast<double>(random.magnitude(256, 1e6));
    const Curve need = [&](std::int64_t s) {
      const double x = kind.curve(static_cast<double>(s) / scale);
      const auto bytes = static_cast<std::int64_t>(available * (constant + (1 - constant) * x));
      // What is asked for is not rounded.
      return shows == Shows::trace ? bytes
                                   : (bytes + kind.granule - 1) / kind.granule * kind.granule;
    };
    const auto bytes = static_cast<std::int64_t>(available);
    const auto upper = static_cast<std::int64_t>(scale * random.real(0.5, 50));
    const std::int64_t most = largest_fit(need, bytes, upper);
    SizeSearch search({.start = Start::probe, .upper = upper});
    const Attempts run =
        until_finished(search, need, bytes, static_cast<std::int64_t>(available * constant), shows);
    ASSERT_LE(run.failures, 3);
    ASSERT_LE(run.outcomes.size(), 20U);
    clean += run.failures == 0 ? 1 : 0;
    close += share(search.best().value_or(0), most) >= kind.end ? 1 : 0;
  }
  EXPECT_GE(clean, kind.without_failure * cases) << clean;
  EXPECT_GE(close, 0.99 * cases);
}

class ProbingHarderNeeds : public ::testing::TestWithParam<HarderNeed> {};

TEST_P(ProbingHarderNeeds, RarelyFailsAndComesClose) {
  probe_harder_need(GetParam(), Shows::trace);
}

TEST_P(ProbingHarderNeeds, RarelyFailsAndComesCloseWherePeaksAreAllThatIsKnown) {
  probe_harder_need(GetParam(), Shows::peak);
}

INSTANTIATE_TEST_SUITE_P(
    Probing, ProbingHarderNeeds,
    ::testing::Values(
        HarderNeed{"coarse", [](double x) { return x; }, 2 * kMiB, 1.0, 0.96},
        HarderNeed{"coarse_beside_little", [](double x) { return x; }, 2 * kMiB, 0.93, 0.85, 1e8,
                   1e9},
        HarderNeed{"quadratic", [](double x) { return x * x; }, 512, 0.995, 0.98},
        HarderNeed{"quadratic_coarse", [](double x) { return x * x; }, 2 * kMiB, 0.97, 0.93},
        HarderNeed{"concave", [](double x) { return std::pow(x, 0.8); }, 512, 0.99, 0.95}),
    [](const auto& setting) { return std::string(setting.param.name); });

TEST(Probing, SurvivesAnotherKernelAtSmallSizes) {
  // Below 25 no temporaries are needed: what tiny probes show is too little by far.
  Random random(9);
  int clean = 0;
  const int cases = 3000;
  for (int i = 0; i < cases; ++i) {
    const std::int64_t most = random.magnitude(256, 1e5);
    const std::int64_t available = most * 12 * kMiB;
    const std::int64_t constant = random.integer(0, available / 3);
    const Curve need = [&](std::int64_t s) {
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

TEST(Probing, StartsSmallAndGrowsAtMostSixteenfoldUnconfirmed) {
  SizeSearch search({.start = Start::probe, .upper = 6400});
  EXPECT_EQ(search.next(), 100);
  search.record({.values = {100}, .peak = 0, .available = 1'000'000'000});
  EXPECT_EQ(search.next(), 1600);
}

TEST(Probing, ShrinksBeforeItFailsWhenLessIsLeft) {
  // Results that pile up: each part leaves bytes behind, so the step that fitted will not fit for
  // ever.
  const Curve need = [](std::int64_t s) { return s * kMiB; };
  SizeSearch search({.start = Start::probe, .upper = 4000});
  std::int64_t held = 0;
  std::int64_t smallest_use = kHuge;
  for (int part = 0; part < 300; ++part) {
    const std::int64_t available = 1000 * kMiB - held;
    Attempt tried = attempt(need, search.next(), available);
    tried.left = 2 * kMiB;
    EXPECT_TRUE(tried.fitted()) << part;
    if (part > 10) {
      smallest_use = std::min(smallest_use, 100 * need(tried.size()) / available);
    }
    search.record(tried);
    held += tried.left;
  }
  EXPECT_GE(smallest_use, 93);
}

TEST(Probing, SettledStaysAtItsSize) {
  const Curve need = [](std::int64_t s) { return 1000 + s * 100; };
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

TEST(Probing, ARememberedFailureThatWasNotForeseenIsApproachedByHalves) {
  const Curve need = [](std::int64_t s) { return s * kMiB; };
  SizeSearch search(
      {.start = Start::probe, .upper = 10'000, .circumstances = {.available = 1000 * kMiB}});
  search.remember({.values = {800},
                   .outcome = outcome(false),
                   .peak = 100 * kMiB,
                   .requested = 950 * kMiB,
                   .available = 1000 * kMiB,
                   .expected = 800 * kMiB});
  search.remember(attempt(need, 400, 1000 * kMiB));
  search.remember(attempt(need, 500, 1000 * kMiB));
  EXPECT_GT(search.next(), 500);
  EXPECT_LE(search.next(), 650) << "the need says 799, as it did before 800 failed";
}

TEST(Probing, ARememberedFailureThatTheNeedExplainsDoesNotHoldItBack) {
  const Curve need = [](std::int64_t s) { return s * kMiB; };
  SizeSearch search(
      {.start = Start::probe, .upper = 10'000, .circumstances = {.available = 1000 * kMiB}});
  for (const std::int64_t size : {1200, 400, 500}) {
    search.remember(attempt(need, size, 1000 * kMiB));
  }
  EXPECT_GE(search.next(), 950);
  EXPECT_LE(search.next(), 1000);
  EXPECT_EQ(search.expected(), need(search.next())) << "if it fails, that was not foreseen";
}

TEST(Probing, AFailureThatItsBytesDoNotExplainIsRetriedOnceAfterSomeFits) {
  SizeSearch search({.start = Start::probe, .upper = 1000});
  const auto record = [&](bool fitted, int times) {
    for (int i = 0; i < times; ++i) {
      search.record({.values = {search.next()},
                     .outcome = outcome(fitted),
                     .peak = fitted ? search.next() * kMiB / 10 : 0,
                     .requested = 1,
                     .available = 1000 * kMiB});
    }
  };
  record(true, 1);
  record(false, 1);
  ASSERT_TRUE(search.smallest_failure());
  record(true, 2);
  EXPECT_TRUE(search.smallest_failure());
  record(true, 1);
  EXPECT_FALSE(search.smallest_failure());
  record(false, 1);
  record(true, 9);
  EXPECT_TRUE(search.smallest_failure()) << "it is the size, after all";
}

TEST(Probing, WithNothingAvailableItBeginsWithTheSmallestSize) {
  const Curve need = [](std::int64_t s) { return s * kMiB; };
  SizeSearch search({.start = Start::probe, .upper = 6400, .circumstances = {.available = 0}});
  search.remember(attempt(need, 100, 1000 * kMiB));
  search.remember(attempt(need, 200, 1000 * kMiB));
  EXPECT_EQ(search.next(), 1);
}

TEST(Probing, LeavesTinySizes) {
  // From 1 the cautious prediction is 1.4: without a step on trial it would stay at a tenth of what
  // fits.
  const Curve need = [](std::int64_t s) { return 500 + 50 * s; };
  SizeSearch search({.start = Start::probe, .upper = 10});
  const Attempts run = until_finished(search, need, 1000);
  EXPECT_EQ(run.failures, 0);
  EXPECT_GE(*search.best(), 9);
}

}  // namespace
}  // namespace brim
