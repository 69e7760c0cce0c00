#include <brim/batching/buckets.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "batching/reference.h"

namespace brim::batching {
namespace {

using namespace reference;

constexpr std::int64_t kSmallest = std::numeric_limits<std::int64_t>::min();

/// Sizes of several shapes: few distinct ones, many, far apart (the sort instead of the count).
Ints random_sizes(std::mt19937& random, std::int64_t count) {
  const auto spread = std::int64_t{1} << (random() % 40);
  std::uniform_int_distribution<std::int64_t> size(-spread / 4, spread);
  Ints sizes(static_cast<std::size_t>(count));
  std::generate(sizes.begin(), sizes.end(), [&] { return size(random); });
  return sizes;
}

// ---------------------------------------------------------------- create_buckets

/// The rule, one unit of size after the other.
Buckets buckets_by_walking(const Ints& sizes, std::int64_t max_width, std::int64_t min_count) {
  std::map<std::int64_t, std::int64_t> counts;
  for (const std::int64_t size : sizes) {
    ++counts[size];
  }
  const std::int64_t end = counts.rbegin()->first + 1;
  Buckets result{{counts.begin()->first}, {0}};
  for (std::int64_t size = counts.begin()->first; size < end; ++size) {
    const bool full = result.counts.back() >= min_count && counts.count(size) > 0;
    if (full || size - result.boundaries.back() == max_width) {
      result.boundaries.push_back(size);
      result.counts.push_back(0);
    }
    const auto found = counts.find(size);
    result.counts.back() += found == counts.end() ? 0 : found->second;
  }
  result.boundaries.push_back(end);
  return result;
}

TEST(CreateBuckets, FollowsItsRuleForRandomSizes) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 2000; ++trial) {
    Ints sizes(1 + random() % 60);
    const std::int64_t spread = 1 + static_cast<std::int64_t>(random() % 200);
    for (std::int64_t& size : sizes) {
      size = static_cast<std::int64_t>(random() % static_cast<unsigned>(spread)) - spread / 3;
    }
    const std::int64_t width = 1 + static_cast<std::int64_t>(random() % 30);
    const std::int64_t count = 1 + static_cast<std::int64_t>(random() % 20);
    const Buckets expected = buckets_by_walking(sizes, width, count);
    const Buckets buckets = create_buckets(sizes, width, count);
    ASSERT_EQ(buckets.boundaries, expected.boundaries) << "trial " << trial;
    ASSERT_EQ(buckets.counts, expected.counts) << "trial " << trial;
  }
}

TEST(CreateBuckets, GapIsFilledWithEmptyBuckets) {
  const Buckets buckets =
      create_buckets(Ints{1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 22, 22, 22, 22}, 5, 10);
  EXPECT_EQ(buckets.boundaries, (Ints{1, 6, 11, 16, 21, 23}));
  EXPECT_EQ(buckets.counts, (Ints{12, 0, 0, 0, 4}));
}

TEST(CreateBuckets, EveryBucketIsInsideTheWidthAndTheCountsAreRight) {
  std::mt19937 random(2);
  for (int trial = 0; trial < 60; ++trial) {
    const Ints sizes = random_sizes(random, 20'000);
    const auto [low, high] = std::minmax_element(sizes.begin(), sizes.end());
    const std::int64_t width = 1 + (*high - *low) / 1000;
    const std::int64_t count = 1 + static_cast<std::int64_t>(random() % 100);
    const Buckets buckets = create_buckets(sizes, width, count);
    ASSERT_EQ(buckets.boundaries.size(), buckets.counts.size() + 1);
    EXPECT_EQ(buckets.boundaries.front(), *low);
    EXPECT_EQ(buckets.boundaries.back(), *high + 1);
    Ints sorted = sizes;
    std::sort(sorted.begin(), sorted.end());
    for (std::size_t k = 0; k < buckets.counts.size(); ++k) {
      const std::int64_t from = buckets.boundaries[k];
      const std::int64_t to = buckets.boundaries[k + 1];
      EXPECT_LT(from, to);
      EXPECT_LE(to - from, width);
      EXPECT_EQ(std::lower_bound(sorted.begin(), sorted.end(), to) -
                    std::lower_bound(sorted.begin(), sorted.end(), from),
                buckets.counts[k]);
      if (buckets.counts[k] < count && k + 1 < buckets.counts.size()) {
        EXPECT_EQ(to - from, width) << "a bucket with few samples ends only at the full width";
      }
    }
  }
}

TEST(CreateBuckets, SizesAtTheEndsOf64BitsDoNotOverflow) {
  const Buckets wide = create_buckets(Ints{kSmallest, 0, kLargest - 1}, kLargest, 1);
  EXPECT_EQ(wide.boundaries, (Ints{kSmallest, -1, kLargest - 1, kLargest}));
  EXPECT_EQ(wide.counts, (Ints{1, 1, 1}));
}

TEST(CreateBuckets, WrongArgumentIsAnErrorThatNamesIt) {
  const Ints some{1, 2, 3};
  expect_message([] { (void)create_buckets(Ints{}, 1, 1); }, {"sizes", "empty"});
  expect_message([&] { (void)create_buckets(some, 0, 1); }, {"max_width=0", "at least 1"});
  expect_message([&] { (void)create_buckets(some, 1, -2); }, {"min_bucket_count=-2", "at least 1"});
  expect_message([] { (void)create_buckets(Ints{0, kLargest}, 1, 1); },
                 {"sizes", std::to_string(kLargest), "below 2^63 - 1"});
}

TEST(CreateBuckets, MoreBucketsThanMemoryIsForAreRefused) {
  expect_message([] { (void)create_buckets(Ints{0, 1'000'000'000'000}, 1, 1); },
                 {"max_width=1", "2^24", "from 0 to 1000000000000"});
  expect_message([] { (void)create_buckets(Ints{kSmallest, 0, kLargest - 1}, 1, 1); }, {"2^24"});
  EXPECT_EQ(create_buckets(Ints{0, (1 << 24) - 1}, 1, 1).counts.size(), std::size_t{1} << 24);
}

// ---------------------------------------------------------------- least padding

template <typename Size>
double padding(const std::vector<Size>& sizes, const std::vector<Size>& boundaries) {
  double total = 0;
  for (std::size_t k = 1; k < boundaries.size(); ++k) {
    std::vector<Size> bucket;
    std::copy_if(sizes.begin(), sizes.end(), std::back_inserter(bucket),
                 [&](Size size) { return size >= boundaries[k - 1] && size < boundaries[k]; });
    const auto longest = std::max_element(bucket.begin(), bucket.end());
    for (const Size size : bucket) {
      total += static_cast<double>(*longest) - static_cast<double>(size);
    }
  }
  return total;
}

/// Tries every choice of boundaries among the distinct sizes.
template <typename Size>
double least_padding_by_trying(const std::vector<Size>& sizes, std::size_t buckets) {
  std::vector<Size> distinct = sizes;
  std::sort(distinct.begin(), distinct.end());
  distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
  double least = std::numeric_limits<double>::infinity();
  for (unsigned chosen = 0; chosen < 1U << (distinct.size() - 1); ++chosen) {
    std::vector<Size> boundaries{distinct.front()};
    for (std::size_t i = 1; i < distinct.size(); ++i) {
      if ((chosen >> (i - 1) & 1U) != 0) {
        boundaries.push_back(distinct[i]);
      }
    }
    if (boundaries.size() <= buckets) {
      boundaries.push_back(distinct.back() + 1);
      least = std::min(least, padding(sizes, boundaries));
    }
  }
  return least;
}

TEST(LeastPadding, IsWhatTryingAllDivisionsFinds) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 300; ++trial) {
    Ints sizes(1 + random() % 12);
    for (std::int64_t& size : sizes) {
      size = static_cast<std::int64_t>(random() % 50) - 10;
    }
    const std::size_t buckets = 1 + random() % 6;
    const Ints boundaries = least_padding_boundaries(sizes, buckets);
    ASSERT_LE(boundaries.size(), buckets + 1);
    EXPECT_EQ(boundaries.front(), *std::min_element(sizes.begin(), sizes.end()));
    EXPECT_EQ(boundaries.back(), *std::max_element(sizes.begin(), sizes.end()) + 1);
    EXPECT_EQ(padding(sizes, boundaries), least_padding_by_trying(sizes, buckets));
  }
}

TEST(LeastPadding, OfDoublesIsWhatTryingAllDivisionsFinds) {
  std::mt19937 random(4);
  std::lognormal_distribution<double> size(0.0, 3.0);
  for (int trial = 0; trial < 300; ++trial) {
    Doubles sizes(1 + random() % 10);
    std::generate(sizes.begin(), sizes.end(), [&] { return size(random); });
    const std::size_t buckets = 1 + random() % 6;
    const Doubles boundaries = least_padding_boundaries(sizes, buckets);
    const double largest = *std::max_element(sizes.begin(), sizes.end());
    EXPECT_EQ(boundaries.back(), std::nextafter(largest, 2 * largest));
    const double expected = least_padding_by_trying(sizes, buckets);
    EXPECT_NEAR(padding(sizes, boundaries), expected, 1e-12 * largest + 1e-9 * expected);
  }
}

TEST(LeastPadding, AsManyBucketsAsDistinctSizesPadNothing) {
  const Ints sizes{7, 3, 3, 900, 12, 7};
  for (const std::size_t buckets : {4U, 5U, 1000U}) {
    EXPECT_EQ(least_padding_boundaries(sizes, buckets), (Ints{3, 7, 12, 900, 901}));
  }
}

TEST(LeastPadding, SizesTooLargeForExactSumsAreStillDivided) {
  const Ints sizes{kSmallest, kSmallest + 5, 0, 3, kLargest - 9, kLargest - 1};
  EXPECT_EQ(least_padding_boundaries(sizes, 3), (Ints{kSmallest, 0, kLargest - 9, kLargest}));
  const double big = std::numeric_limits<double>::max() / 1.5;
  EXPECT_EQ(least_padding_boundaries(Doubles{-big, -0.9 * big, big}, 2),
            (Doubles{-big, big, std::nextafter(big, 2 * big)}));
}

TEST(LeastPadding, NegativeZeroAndZeroAreOneSize) {
  const Doubles boundaries = least_padding_boundaries(Doubles{0.0, -0.0, 1.0}, 5);
  EXPECT_EQ(boundaries, (Doubles{0.0, 1.0, std::nextafter(1.0, 2.0)}));
}

TEST(LeastPadding, ThinnedOutBoundariesCostLittle) {
  std::mt19937_64 random(5);
  std::lognormal_distribution<double> size(10.0, 1.5);
  Ints sizes(60'000);  // nearly all of them distinct, three times as many as are considered
  std::generate(sizes.begin(), sizes.end(), [&] { return std::llround(size(random) * 1e6); });
  std::sort(sizes.begin(), sizes.end());
  // Two buckets have one boundary between them: all of its places can be tried.
  const double total = std::accumulate(sizes.begin(), sizes.end(), 0.0);
  double below = 0;
  double least = std::numeric_limits<double>::infinity();
  for (std::size_t i = 1; i < sizes.size(); ++i) {
    below += static_cast<double>(sizes[i - 1]);
    const double lower = static_cast<double>(i) * static_cast<double>(sizes[i - 1]) - below;
    const double upper =
        static_cast<double>(sizes.size() - i) * static_cast<double>(sizes.back()) - (total - below);
    least = std::min(least, lower + upper);
  }
  const double found = padding(sizes, least_padding_boundaries(sizes, 2));
  EXPECT_GE(found, least * (1 - 1e-9));
  EXPECT_LE(found, least * 1.001);
}

TEST(LeastPadding, WrongArgumentIsAnErrorThatNamesIt) {
  expect_message([] { (void)least_padding_boundaries(Ints{}, 3); }, {"sizes", "empty"});
  expect_message([] { (void)least_padding_boundaries(Ints{1, 2}, 0); },
                 {"buckets=0", "at least 1"});
  expect_message([] { (void)least_padding_boundaries(Ints{1, kLargest}, 2); }, {"below 2^63 - 1"});
  expect_message([] { (void)least_padding_boundaries(Doubles{1.0, std::nan("")}, 2); },
                 {"sizes[1]=nan", "finite"});
  expect_message([] { (void)least_padding_boundaries(Doubles{-HUGE_VAL, 1.0}, 2); },
                 {"sizes[0]=-inf", "finite"});
}

// ---------------------------------------------------------------- groups

TEST(GroupByBucket, EverySampleIsInItsBucketInItsOrder) {
  std::mt19937 random(6);
  for (int trial = 0; trial < 300; ++trial) {
    Ints sizes(random() % 100);
    for (std::int64_t& size : sizes) {
      size = static_cast<std::int64_t>(random() % 40);
    }
    Ints boundaries{static_cast<std::int64_t>(random() % 10)};
    for (std::size_t k = 1 + random() % 9; k > 0; --k) {
      boundaries.push_back(boundaries.back() + 1 + static_cast<std::int64_t>(random() % 6));
    }
    const BucketGroups groups = group_by_bucket(sizes, boundaries);
    const Doubles real_sizes(sizes.begin(), sizes.end());
    const Doubles real_boundaries(boundaries.begin(), boundaries.end());
    EXPECT_EQ(group_by_bucket(real_sizes, real_boundaries).indices, groups.indices);
    ASSERT_EQ(groups.offsets.size(), boundaries.size());
    ASSERT_EQ(groups.offsets.front(), 0);
    Ints expected;
    for (std::size_t k = 0; k + 1 < boundaries.size(); ++k) {
      for (std::size_t i = 0; i < sizes.size(); ++i) {
        if (sizes[i] >= boundaries[k] && sizes[i] < boundaries[k + 1]) {
          expected.push_back(static_cast<std::int64_t>(i));
        }
      }
      EXPECT_EQ(groups.offsets[k + 1], static_cast<std::int64_t>(expected.size()));
    }
    EXPECT_EQ(groups.indices, expected);
  }
}

TEST(GroupByBucket, BoundariesMayBeInfinite) {
  const BucketGroups groups =
      group_by_bucket(Doubles{-1e300, 5.0, 1e300}, Doubles{-HUGE_VAL, 0.0, HUGE_VAL});
  EXPECT_EQ(groups.indices, (Ints{0, 1, 2}));
  EXPECT_EQ(groups.offsets, (Ints{0, 1, 3}));
}

TEST(GroupByBucket, WrongArgumentIsAnErrorThatNamesIt) {
  const Ints some{1, 2};
  expect_message([&] { (void)group_by_bucket(some, Ints{1}); }, {"boundaries=1", "at least 2"});
  expect_message([&] { (void)group_by_bucket(some, Ints{1, 4, 4}); }, {"boundaries[2]=4", "above"});
  expect_message([] { (void)group_by_bucket(Doubles{0.0}, Doubles{0.0, std::nan("")}); },
                 {"boundaries[1]=nan", "above"});
  expect_message([] { (void)group_by_bucket(Doubles{0.0, HUGE_VAL}, Doubles{0.0, 1.0}); },
                 {"sizes[1]=inf", "finite"});
}

}  // namespace
}  // namespace brim::batching
