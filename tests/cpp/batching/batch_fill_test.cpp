#include "batching/batch_fill.h"

#include <brim/batching/batch_fill.h>
#include <gtest/gtest.h>

#include <span>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include "batching/reference.h"

namespace brim::batching {
namespace {

using namespace reference;

const std::array<Cost, 5>& costs() {
  static const std::array<Cost, 5> all{Cost::sum(), Cost::count(), Cost::padded(),
                                       Cost::padded_squared(), Cost::flops()};
  return all;
}

/// Adds what fits; every answer is that of the wide numbers.
template <class T>
void expect_exact(const Limit& limit, const std::vector<T>& sizes) {
  const Columns<T> columns{{{}, limit}};
  detail::MultiFill<T> fill(columns);
  std::vector<T> batch;
  for (const T size : sizes) {
    ASSERT_EQ(fill.fits_alone(&size), within(limit, std::vector<T>{size})) << size;
    std::vector<T> with = batch;
    with.push_back(size);
    ASSERT_EQ(fill.fits(&size), within(limit, with)) << batch.size() << " and " << size;
    if (within(limit, with)) {
      fill.add(&size);
      batch = with;
    } else if (batch.size() > 3) {
      fill.clear();
      batch.clear();
    }
    const auto cost = static_cast<double>(cost_of(limit.cost().kind(), batch));
    ASSERT_NEAR(fill.load(), cost / limit.real(), 1e-12);
  }
}

TEST(BatchFill, OfWholeSizesAnswersAsWideNumbersDo) {
  Random random(1);
  for (int trial = 0; trial < 400; ++trial) {
    const std::int64_t most = std::int64_t{1} << any_int(random, 0, 62);
    const Ints sizes = random_ints(random, 60, 0, most);
    for (const Cost& cost : costs()) {
      const std::int64_t maximum = any_int(random, 1, std::int64_t{1} << any_int(random, 1, 62));
      expect_exact(Limit(cost, maximum), sizes);
      expect_exact(Limit(cost, kLargest), sizes);
      ASSERT_FALSE(HasFailure());
    }
  }
}

TEST(BatchFill, SquaresOfHugeSizesDoNotOverflow) {
  Random random(2);
  for (int trial = 0; trial < 200; ++trial) {
    const std::int64_t center = std::int64_t{1} << any_int(random, 28, 42);
    const Ints sizes = random_ints(random, 60, center - 100, center + 100);
    for (const std::int64_t maximum :
         {kLargest, std::int64_t{1} << 60, (std::int64_t{1} << 62) + 12345}) {
      expect_exact(Limit(Cost::padded_squared(), maximum), sizes);
      ASSERT_FALSE(HasFailure());
    }
  }
  // 2^31 squared is 2^62, and twice that is one too many for 2^63 - 1.
  const Limit limit(Cost::padded_squared(), kLargest);
  EXPECT_EQ(detail::PaddedFill<std::int64_t>(limit).largest_count(std::int64_t{1} << 31), 1);
  EXPECT_EQ(detail::PaddedFill<std::int64_t>(limit).largest_count(std::int64_t{1} << 32), 0);
  EXPECT_EQ(detail::PaddedFill<double>(limit).largest_count(1e200), 0);
}

TEST(BatchFill, OfQuartersAnswersExactly) {
  Random random(3);
  for (int trial = 0; trial < 400; ++trial) {
    const Doubles sizes = random_quarters(random, 60, 0, 1 + trial % 50);
    for (const Cost& cost : costs()) {
      expect_exact(Limit(cost, 0.25 * static_cast<double>(any_int(random, 1, 4000))), sizes);
      ASSERT_FALSE(HasFailure());
    }
  }
}

TEST(BatchFill, RoundedProductsStayWithinTheBudget) {
  Random random(4);
  std::uniform_real_distribution<double> any(1e-3, 1.0);
  for (int trial = 0; trial < 20'000; ++trial) {
    // A multiple of the size, up to rounding: the quotient is most easily rounded up here.
    const double size = any(random);
    const double times = std::floor(1 + 1e6 * any(random) * any(random));
    const double maximum = trial % 2 == 0 ? size * times : std::nextafter(size * times, 0.0);
    const Limit limit(Cost::padded(), maximum);
    const auto count = static_cast<double>(detail::PaddedFill<double>(limit).largest_count(size));
    ASSERT_LE(count * size, maximum);
    ASSERT_GE(count, times - 1);
  }
}

TEST(BatchFill, SizesOfZeroAreUnlimitedButCounted) {
  const double zero = 0.0;
  const std::array<double, 2> limits{0.5, 3.0};
  for (const double maximum : limits) {
    for (const Cost& cost : {Cost::sum(), Cost::padded(), Cost::padded_squared()}) {
      BatchFill fill({Limit(cost, maximum)});
      for (int i = 0; i < 100; ++i) {
        ASSERT_TRUE(fill.fits({&zero, 1}));
        fill.add({&zero, 1});
      }
      EXPECT_EQ(fill.load(), 0.0);
    }
  }
  BatchFill counting({Limit(Cost::count(), 3.0)});
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(counting.fits({&zero, 1}));
    counting.add({&zero, 1});
  }
  EXPECT_FALSE(counting.fits({&zero, 1}));
  EXPECT_EQ(counting.load(), 1.0);
  EXPECT_FALSE(BatchFill({Limit(Cost::count(), 0.5)}).fits_alone({&zero, 1}));
}

TEST(BatchFill, LongerSampleCountsForAllThatAreInAlready) {
  BatchFill fill({Limit(Cost::padded(), 12.0)});
  const double two = 2.0;
  const double four = 4.0;
  const double five = 5.0;
  fill.add({&two, 1});
  fill.add({&two, 1});
  EXPECT_TRUE(fill.fits({&four, 1}));   // 3 of 4
  EXPECT_FALSE(fill.fits({&five, 1}));  // 3 of 5
  fill.add({&four, 1});
  EXPECT_FALSE(fill.fits({&two, 1}));  // 4 of 4
  EXPECT_EQ(fill.load(), 1.0);
  fill.clear();
  EXPECT_EQ(fill.load(), 0.0);
  EXPECT_TRUE(fill.fits({&five, 1}));
}

TEST(BatchFill, SeveralLimitsHoldAtOnce) {
  Random random(5);
  for (int trial = 0; trial < 300; ++trial) {
    const std::vector<Limit> limits{Limit(Cost::sum(), any_int(random, 10, 100)),
                                    Limit(Cost::padded(), any_int(random, 10, 200)),
                                    Limit(Cost::count(), any_int(random, 1, 12)),
                                    Limit(Cost::sum(), any_int(random, 10, 100))};
    BatchFill fill(limits);
    std::vector<Doubles> batch(limits.size());
    for (int i = 0; i < 30; ++i) {
      const Doubles sizes = random_quarters(random, 4, 0, 20);
      bool fits = true;
      bool alone = true;
      double load = 0.0;
      for (std::size_t c = 0; c < limits.size(); ++c) {
        load = std::max(load, cost_of(limits[c].cost().kind(), batch[c]) / limits[c].real());
        alone = alone && within(limits[c], Doubles{sizes[c]});
        Doubles with = batch[c];
        with.push_back(sizes[c]);
        fits = fits && within(limits[c], with);
      }
      ASSERT_DOUBLE_EQ(fill.load(), load);
      ASSERT_EQ(fill.fits(sizes), fits);
      ASSERT_EQ(fill.fits_alone(sizes), alone);
      if (fits) {
        fill.add(sizes);
        for (std::size_t c = 0; c < limits.size(); ++c) {
          batch[c].push_back(sizes[c]);
        }
      }
    }
  }
}

TEST(BatchFill, CustomCostIsAskedOnlyForALongerSample) {
  int asked = 0;
  const Cost cost = Cost::custom(
      [&asked](double longest, double budget) {
        ++asked;
        return static_cast<std::int64_t>(budget / (100 + longest));
      },
      [](std::int64_t count, double longest) {
        return static_cast<double>(count) * (100 + longest);
      });
  BatchFill fill({Limit(cost, 1000.0)});
  const double ten = 10.0;
  fill.add({&ten, 1});
  const int before = asked;
  for (int i = 1; i < 9; ++i) {
    ASSERT_TRUE(fill.fits({&ten, 1}));
    fill.add({&ten, 1});
  }
  EXPECT_FALSE(fill.fits({&ten, 1}));
  EXPECT_EQ(asked, before);
  EXPECT_DOUBLE_EQ(fill.load(), 0.99);
}

TEST(BatchFill, MovedFillKeepsItsLimitsAndSamples) {
  const double six = 6.0;
  BatchFill first({Limit(Cost::sum(), 10.0)});
  first.add({&six, 1});
  BatchFill second(std::move(first));
  EXPECT_FALSE(second.fits({&six, 1}));
  EXPECT_TRUE(second.fits_alone({&six, 1}));
}

TEST(BatchFill, RefusesAnotherNumberOfSizesAndWhatIsNoSize) {
  BatchFill fill({Limit(Cost::sum(), 10.0), Limit(Cost::padded(), 10.0)});
  const std::vector<double> three{1, 2, 3};
  expect_message([&] { (void)fill.fits(three); }, {"2 limits", "got 3"});
  expect_message([&] { fill.add(std::span(three).first(1)); }, {"2 limits", "got 1"});
  for (const double wrong : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    const std::vector<double> sizes{1, wrong};
    expect_message([&] { (void)fill.fits_alone(sizes); }, {"not negative", "got"});
  }
  EXPECT_EQ(fill.load(), 0.0) << "nothing was added";
}

TEST(BatchFill, NeedsALimit) {
  expect_message([] { BatchFill({}); }, {"at least one limit"});
}

/// n × the sum or the product of the longest of each of three sizes.
Wide joint_cost(Cost::Kind kind, const std::vector<std::array<std::int64_t, 3>>& batch) {
  std::array<std::int64_t, 3> longest{};
  for (const auto& sizes : batch) {
    for (std::size_t c = 0; c < 3; ++c) {
      longest[c] = std::max(longest[c], sizes[c]);
    }
  }
  const auto n = static_cast<Wide>(batch.size());
  const Wide sum = Wide{longest[0]} + longest[1] + longest[2];
  return kind == Cost::Kind::padded_product ? n * longest[0] * longest[1] * longest[2]
         : kind == Cost::Kind::padded       ? n * sum
                                            : n * sum * sum;
}

TEST(BatchFill, OfJoinedColumnsAnswersAsWideNumbersDo) {
  Random random(4);
  const std::array<Cost, 3> costs{Cost::padded(), Cost::padded_product(), Cost::padded_squared()};
  for (int trial = 0; trial < 300; ++trial) {
    const Cost& cost = costs[static_cast<std::size_t>(trial) % costs.size()];
    const std::int64_t maximum = any_int(random, 1, std::int64_t{1} << any_int(random, 1, 62));
    const std::int64_t most = std::int64_t{1} << any_int(random, 0, 38);
    const Columns<std::int64_t> columns{
        {{}, Limit(cost, maximum)}, {{}, Limit::joined()}, {{}, Limit::joined()}};
    detail::MultiFill<std::int64_t> fill(columns);
    std::vector<std::array<std::int64_t, 3>> batch;
    for (int i = 0; i < 40; ++i) {
      const std::array<std::int64_t, 3> sizes{any_int(random, 0, most), any_int(random, 0, most),
                                              any_int(random, 0, most)};
      ASSERT_EQ(fill.fits_alone(sizes.data()), joint_cost(cost.kind(), {sizes}) <= maximum);
      std::vector<std::array<std::int64_t, 3>> with = batch;
      with.push_back(sizes);
      const bool fits = joint_cost(cost.kind(), with) <= maximum;
      ASSERT_EQ(fill.fits(sizes.data()), fits);
      if (fits) {
        fill.add(sizes.data());
        batch = with;
      } else if (batch.size() > 5) {
        fill.clear();
        batch.clear();
      }
      const auto price = static_cast<double>(joint_cost(cost.kind(), batch));
      ASSERT_NEAR(fill.load(), batch.empty() ? 0.0 : price / static_cast<double>(maximum), 1e-9);
    }
  }
}

TEST(BatchFill, JoinedColumnsOfTheLargestSizesExceedEveryBudget) {
  for (const Cost& cost : {Cost::padded(), Cost::padded_product(), Cost::flops()}) {
    const Columns<std::int64_t> columns{{{}, Limit(cost, kLargest)}, {{}, Limit::joined()}};
    const std::array<std::int64_t, 2> sizes{kLargest, kLargest};
    EXPECT_FALSE(detail::MultiFill<std::int64_t>(columns).fits_alone(sizes.data()));
  }
}

TEST(BatchFill, JoinedColumnsNeedOneToJoin) {
  const Columns<double> first{{{}, Limit::joined()}};
  EXPECT_THROW(detail::MultiFill<double>{first}, std::invalid_argument);
  const Columns<double> sum{{{}, Limit(Cost::sum(), 5.0)}, {{}, Limit::joined()}};
  EXPECT_THROW(detail::MultiFill<double>{sum}, std::invalid_argument);
  const Cost one = Cost::priced([](std::int64_t n, double longest) { return longest * double(n); });
  const Columns<double> custom{{{}, Limit(one, 5.0)}, {{}, Limit::joined()}};
  EXPECT_THROW(detail::MultiFill<double>{custom}, std::invalid_argument);
}

}  // namespace
}  // namespace brim::batching
