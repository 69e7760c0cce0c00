#include <brim/batching/cost.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "batching/reference.h"

namespace brim::batching {
namespace {

using reference::expect_message;
using reference::kLargest;

TEST(Limit, KeepsWholeBudgetsExactly) {
  for (const std::int64_t maximum : {std::int64_t{1}, std::int64_t{16384}, std::int64_t{1} << 53,
                                     (std::int64_t{1} << 53) + 1, kLargest - 1, kLargest}) {
    EXPECT_EQ(Limit(Cost::sum(), maximum).whole(), maximum);
  }
}

TEST(Limit, RealBudgetIsNeverAboveTheWholeOne) {
  const std::int64_t exact = std::int64_t{1} << 53;
  EXPECT_EQ(Limit(Cost::sum(), exact).real(), 0x1p53);
  EXPECT_EQ(Limit(Cost::sum(), exact + 1).real(), 0x1p53);
  EXPECT_EQ(Limit(Cost::sum(), exact + 2).real(), 0x1p53 + 2);
  EXPECT_EQ(Limit(Cost::sum(), exact + 3).real(), 0x1p53 + 2) << "the nearest would be above";
  EXPECT_EQ(Limit(Cost::sum(), kLargest).real(), std::nextafter(0x1p63, 0.0));
}

TEST(Limit, FractionDoesNotCountForWholeSizes) {
  EXPECT_EQ(Limit(Cost::sum(), 0.5).whole(), 0);
  EXPECT_EQ(Limit(Cost::sum(), 0.5).real(), 0.5);
  EXPECT_EQ(Limit(Cost::sum(), 7.999).whole(), 7);
  EXPECT_EQ(Limit(Cost::sum(), 0x1p63).whole(), kLargest);
  EXPECT_EQ(Limit(Cost::sum(), 1e300).whole(), kLargest);
  EXPECT_EQ(Limit(Cost::sum(), 1e300).real(), 1e300);
}

TEST(Limit, NotPositiveOrNotFiniteIsAnErrorThatNamesIt) {
  expect_message([] { Limit(Cost::sum(), std::int64_t{0}); },
                 {"max_total_size", "positive", "got 0"});
  expect_message([] { Limit(Cost::padded(), std::int64_t{-5}); }, {"max_total_size", "got -5"});
  expect_message([] { Limit(Cost::sum(), 0.0); }, {"max_total_size", "got 0"});
  expect_message([] { Limit(Cost::sum(), -0.5); }, {"got -0.5"});
  expect_message([] { Limit(Cost::sum(), std::nan("")); }, {"finite", "got nan"});
  expect_message([] { Limit(Cost::sum(), HUGE_VAL); }, {"finite", "got inf"});
}

TEST(Cost, CustomNeedsBothItsFunctions) {
  const auto count = [](double, double) { return std::int64_t{1}; };
  const auto price = [](std::int64_t, double) { return 1.0; };
  expect_message([&] { (void)Cost::custom(nullptr, price); }, {"largest_count"});
  expect_message([&] { (void)Cost::custom(count, nullptr); }, {"price"});
  EXPECT_EQ(Cost::custom(count, price).kind(), Cost::Kind::custom);
}

TEST(Cost, IsFoundByItsNameAndAnUnknownNameListsAll) {
  EXPECT_EQ(Cost::named("sum").kind(), Cost::Kind::sum);
  EXPECT_EQ(Cost::named("count").kind(), Cost::Kind::count);
  EXPECT_EQ(Cost::named("padded").kind(), Cost::Kind::padded);
  EXPECT_EQ(Cost::named("padded_product").kind(), Cost::Kind::padded_product);
  EXPECT_EQ(Cost::named("padded_squared").kind(), Cost::Kind::padded_squared);
  EXPECT_EQ(Cost::named("flops").kind(), Cost::Kind::flops);
  expect_message([] { (void)Cost::named("paded"); },
                 {"cost must be " + Cost::names(), "\"paded\""});
  EXPECT_EQ(Cost::names(),
            "\"sum\", \"count\", \"padded\", \"padded_product\", \"padded_squared\", \"flops\"");
}

TEST(Cost, PricedFindsTheLargestCount) {
  const Cost cost = Cost::priced(
      [](std::int64_t n, double longest) { return 100 + static_cast<double>(n) * longest; });
  for (int round = 0; round < 2; ++round) {  // asked, and remembered
    EXPECT_EQ(cost.largest_count()(7, 200), 14);
    EXPECT_EQ(cost.largest_count()(101, 200), 0);
    EXPECT_EQ(cost.largest_count()(7, 300), 28);
    EXPECT_EQ(cost.largest_count()(0.5, 200), 200);
  }
  const Cost wrong = Cost::priced([](std::int64_t, double) { return -1.0; });
  EXPECT_THROW((void)wrong.largest_count()(7, 200), std::invalid_argument);
  EXPECT_THROW((void)Cost::priced({}), std::invalid_argument);
}

TEST(Limit, LargestSizesAreTheLastThatFit) {
  EXPECT_EQ(Limit(Cost::sum(), std::int64_t{10}).largest_whole_size(), 10);
  EXPECT_EQ(Limit(Cost::padded_squared(), std::int64_t{99}).largest_whole_size(), 9);
  EXPECT_EQ(Limit(Cost::flops(), std::int64_t{10 * 24576 + 99}).largest_whole_size(), 9);
  EXPECT_EQ(Limit(Cost::flops(), std::int64_t{10 * 24576 + 100}).largest_whole_size(), 10);
  EXPECT_EQ(Limit(Cost::sum(), 10.5).largest_real_size(), 10.5);
  EXPECT_EQ(Limit(Cost::padded_squared(), 6.25).largest_real_size(), 2.5);
  EXPECT_EQ(Limit(Cost::count(), 3.0).largest_whole_size(),
            std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(Limit(Cost::count(), 3.0).largest_real_size(), std::numeric_limits<double>::max());
  const Cost fixed = Cost::priced([](std::int64_t, double) { return 100.0; });
  EXPECT_THROW((void)Limit(fixed, 50.0).largest_real_size(), std::invalid_argument);
  EXPECT_EQ(Limit(fixed, 100.0).largest_real_size(), std::numeric_limits<double>::max());

  double longest_asked = 0;
  const Cost priced = Cost::priced([&](std::int64_t n, double longest) {
    longest_asked = std::max(longest_asked, longest);
    return static_cast<double>(n) * std::exp(longest);
  });
  EXPECT_EQ(Limit(priced, std::exp(700.5)).largest_whole_size(), 700);  // exp(1024) is infinite
  EXPECT_NEAR(Limit(priced, std::exp(700.5)).largest_real_size(), 700.5, 1e-9);
  EXPECT_NEAR(Limit(priced, std::exp(0.3)).largest_real_size(), 0.3, 1e-9);
  EXPECT_EQ(longest_asked, 1024);
}

}  // namespace
}  // namespace brim::batching
