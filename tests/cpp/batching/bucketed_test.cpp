#include <brim/batching/batching.h>
#include <brim/batching/plan.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "batching/bucket_index.h"
#include "batching/reference.h"

namespace brim::batching {
namespace {

using namespace reference;

BucketOptions in_order(Doubles boundaries, Ints batch_sizes = {}) {
  BucketOptions options;
  options.boundaries = std::move(boundaries);
  options.batch_sizes = std::move(batch_sizes);
  options.shuffle = false;
  return options;
}

template <class T>
std::shared_ptr<const Batching> buckets_of(const std::vector<T>& sizes, BucketOptions options) {
  return bucket_batching(std::span<const T>(sizes), Columns<T>{}, std::move(options));
}

/// -1 where there is none.
template <class T>
std::int64_t bucket_of(const Doubles& boundaries, T size) {
  for (std::size_t b = 0; b + 1 < boundaries.size(); ++b) {
    const auto real = static_cast<double>(size);  // sizes in these tests are below 2^53
    if (real >= boundaries[b] && real < boundaries[b + 1]) {
      return static_cast<std::int64_t>(b);
    }
  }
  return -1;
}

Doubles random_boundaries(Random& random, std::int64_t buckets) {
  Doubles boundaries{0.25 * static_cast<double>(any_int(random, -4, 20))};
  for (std::int64_t b = 0; b < buckets; ++b) {
    boundaries.push_back(boundaries.back() + 0.25 * static_cast<double>(any_int(random, 1, 60)));
  }
  return boundaries;
}

/// Bucket after bucket, in order, as many as the batch size says.
template <class T>
Lists by_hand(const std::vector<T>& sizes, const BucketOptions& options, Ints& outside,
              Ints& dropped) {
  std::map<std::int64_t, Ints> members;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const std::int64_t bucket = bucket_of(options.boundaries, sizes[i]);
    (bucket < 0 ? outside : members[bucket]).push_back(static_cast<std::int64_t>(i));
  }
  Lists lists;
  for (const auto& [bucket, samples] : members) {
    const std::int64_t size = options.batch_sizes[static_cast<std::size_t>(bucket)];
    for (std::int64_t begin = 0; begin < std::ssize(samples); begin += size) {
      const std::int64_t end = std::min<std::int64_t>(std::ssize(samples), begin + size);
      Ints batch(samples.begin() + begin, samples.begin() + end);
      if (options.drop_last && end - begin < size) {
        dropped.insert(dropped.end(), batch.begin(), batch.end());
      } else {
        lists.push_back(std::move(batch));
      }
    }
  }
  return lists;
}

template <class T>
void expect_by_hand(const std::vector<T>& sizes, const BucketOptions& options) {
  Ints outside;
  Ints dropped;
  const Lists expected = by_hand(sizes, options, outside, dropped);
  const auto batching = buckets_of(sizes, options);
  BatchStream stream(*batching, 0);
  ASSERT_EQ(read(stream), expected);
  ASSERT_EQ(indices_of(batching->left_out()), outside);
  ASSERT_EQ(indices_of(stream.left_out()), dropped);
  for (const LeftOut& sample : batching->left_out()) {
    ASSERT_EQ(sample.reason, LeftOutReason::outside_buckets);
  }
  for (const LeftOut& sample : stream.left_out()) {
    ASSERT_EQ(sample.reason, LeftOutReason::dropped_last);
  }
}

TEST(BucketBatching, InOrderIsBucketAfterBucket) {
  Random random(1);
  for (int trial = 0; trial < 400; ++trial) {
    const std::int64_t samples = any_int(random, 0, 500);
    const std::int64_t buckets = any_int(random, 1, 8);
    BucketOptions options =
        in_order(random_boundaries(random, buckets), random_ints(random, buckets, 1, 40));
    options.drop_last = trial % 2 == 0;
    expect_by_hand(random_ints(random, samples, 0, 60), options);
    expect_by_hand(random_quarters(random, samples, 0, 60), options);
    ASSERT_FALSE(HasFailure()) << trial;
  }
}

TEST(BucketBatching, LowerBoundaryBelongsToTheBucketAndUpperToTheNext) {
  const Ints sizes{0, 1, 2, 3, 4, 5};
  const auto batching = buckets_of(sizes, in_order({1, 3, 5}, {10, 10}));
  EXPECT_EQ(read(*batching), (Lists{{1, 2}, {3, 4}}));
  EXPECT_EQ(batching->left_out(), (std::vector<LeftOut>{{0, LeftOutReason::outside_buckets},
                                                        {5, LeftOutReason::outside_buckets}}));
}

TEST(BucketBatching, FractionalBoundariesDivideWholeSizes) {
  const Ints sizes{1, 2, 3, 4};
  EXPECT_EQ(read(*buckets_of(sizes, in_order({1.5, 2.5, 3.5}, {9, 9}))), (Lists{{1}, {2}}));
  EXPECT_EQ(read(*buckets_of(sizes, in_order({-3.5, 2.0, 2.25, 9}, {9, 9, 9}))),
            (Lists{{0}, {1}, {2, 3}}));
}

TEST(BucketBatching, LastBoundaryMayBeInfinite) {
  const Ints sizes{1, 5, 9, 1'000'000, 7};
  const auto batching = buckets_of(sizes, in_order({0, 6, HUGE_VAL}, {2, 2}));
  EXPECT_TRUE(batching->left_out().empty());
  EXPECT_EQ(read(*batching), (Lists{{0, 1}, {2, 3}, {4}}));
  // Ranks are balanced by what batches cost, which is never infinite.
  EXPECT_TRUE(std::isfinite(report(*batching, 0, 2).imbalance));
}

TEST(BucketBatching, HugeSizesFindTheirBucket) {
  const Ints sizes{0, 1 << 20, std::int64_t{1} << 60, kLargest - 1, kLargest};
  EXPECT_EQ(read(*buckets_of(sizes, in_order({0, 65'536, 0x1p60}, {9, 9}))), (Lists{{0}, {1}}));
  EXPECT_EQ(read(*buckets_of(sizes, in_order({0, 0x1p60, 1e19}, {9, 9}))),
            (Lists{{0, 1}, {2, 3, 4}}));
  EXPECT_EQ(read(*buckets_of(sizes, in_order({0, 9, 0x1p63}, {9, 9}))), (Lists{{0}, {1, 2, 3, 4}}));
  EXPECT_EQ(buckets_of(sizes, in_order({1e19, 2e19}, {9}))->left_out().size(), sizes.size());
}

template <class T>
void expect_shuffled_by_bucket(const std::vector<T>& sizes, const Columns<T>& columns,
                               const BucketOptions& options) {
  const auto batching = bucket_batching(std::span<const T>(sizes), columns, options);
  BatchStream stream(*batching, 2);
  Lists lists = read(stream);
  for (const Ints& batch : lists) {
    const std::int64_t bucket =
        bucket_of(options.boundaries, sizes[static_cast<std::size_t>(batch[0])]);
    ASSERT_GE(bucket, 0);
    for (const std::int64_t sample : batch) {
      ASSERT_EQ(bucket_of(options.boundaries, sizes[static_cast<std::size_t>(sample)]), bucket);
    }
    ASSERT_TRUE(columns.empty() || within(columns, batch));
    if (!options.batch_sizes.empty()) {
      ASSERT_LE(std::ssize(batch), options.batch_sizes[static_cast<std::size_t>(bucket)]);
      ASSERT_TRUE(!options.drop_last ||
                  std::ssize(batch) == options.batch_sizes[static_cast<std::size_t>(bucket)]);
    }
  }
  lists.push_back(indices_of(batching->left_out()));
  lists.push_back(indices_of(stream.left_out()));
  ASSERT_EQ(sorted_indices(lists), numbers_below(std::ssize(sizes)));
}

TEST(BucketBatching, ShuffledBatchesAreOfOneBucketAndHoldEachSampleOnce) {
  Random random(2);
  for (int trial = 0; trial < 300; ++trial) {
    const std::int64_t samples = any_int(random, 0, trial % 10 == 0 ? 8000 : 500);
    const std::int64_t buckets = any_int(random, 1, 8);
    BucketOptions options;
    options.boundaries = random_boundaries(random, buckets);
    options.shuffle = trial % 4 != 0;
    const Ints ints = random_ints(random, samples, 0, 60);
    const Ints costs = random_ints(random, samples, 0, 100);
    const Doubles doubles = random_quarters(random, samples, 0, 60);
    for (const Cost& cost : {Cost::sum(), Cost::count(), Cost::padded(), Cost::padded_squared()}) {
      const Limit limit(cost, any_int(random, 50, 2000));
      expect_shuffled_by_bucket(ints, Columns<std::int64_t>{{ints, limit}}, options);
      expect_shuffled_by_bucket(ints, Columns<std::int64_t>{{costs, limit}}, options);
      expect_shuffled_by_bucket(doubles, Columns<double>{{doubles, limit}}, options);
      expect_shuffled_by_bucket(
          ints, Columns<std::int64_t>{{ints, limit}, {costs, Limit(Cost::sum(), 150.0)}}, options);
    }
    options.batch_sizes = random_ints(random, buckets, 1, 40);
    options.drop_last = trial % 2 == 0;
    expect_shuffled_by_bucket(ints, Columns<std::int64_t>{}, options);
    ASSERT_FALSE(HasFailure()) << trial;
  }
}

TEST(BucketBatching, BudgetFillsBatchesGreedilyInOrder) {
  Random random(3);
  const Ints sizes = random_ints(random, 6000, 1, 99);
  const Limit limit(Cost::padded(), std::int64_t{20'000});  // some hundred a batch
  const BucketOptions options = in_order({0, 30, 60, 100});
  Lists expected;
  for (std::int64_t bucket = 0; bucket < 3; ++bucket) {
    Ints batch;
    std::int64_t longest = 0;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      if (bucket_of(options.boundaries, sizes[i]) != bucket) {
        continue;
      }
      if (std::max(longest, sizes[i]) * (std::ssize(batch) + 1) > 20'000) {
        expected.push_back(std::exchange(batch, {}));
        longest = 0;
      }
      longest = std::max(longest, sizes[i]);
      batch.push_back(static_cast<std::int64_t>(i));
    }
    expected.push_back(batch);
  }
  EXPECT_EQ(read(*bucket_batching(std::span<const std::int64_t>(sizes),
                                  Columns<std::int64_t>{{sizes, limit}}, options)),
            expected);
}

TEST(BucketBatching, ShuffleTakesBucketsAsOftenAsTheyHaveSamples) {
  // Nine in ten samples are short. Were the buckets taken in turns, the long ones would be used up
  // after a fifth of the batches.
  Ints sizes(10'000, 1);
  std::fill(sizes.begin(), sizes.begin() + 1000, 9);
  BucketOptions options;
  options.boundaries = {0, 5, 10};
  options.batch_sizes = {10, 10};
  const Lists lists = read(*buckets_of(sizes, options), 4);
  ASSERT_EQ(lists.size(), 1000U);
  std::int64_t in_first_half = 0;
  for (std::size_t b = 0; b < 500; ++b) {
    in_first_half += static_cast<std::int64_t>(lists[b][0] < 1000);
  }
  EXPECT_NEAR(static_cast<double>(in_first_half), 50.0, 25.0);
  EXPECT_FALSE(std::is_sorted(lists[0].begin(), lists[0].end()));
}

TEST(BucketBatching, OversizeIsLeftOutBeforeBucketsAreLookedAt) {
  const Ints sizes{1, 8, 30, 4};
  const Columns<std::int64_t> columns{{sizes, Limit(Cost::sum(), std::int64_t{7})}};
  const auto batching =
      bucket_batching(std::span<const std::int64_t>(sizes), columns, in_order({2, 20}));
  EXPECT_EQ(batching->left_out(), (std::vector<LeftOut>{{1, LeftOutReason::over_budget},
                                                        {2, LeftOutReason::over_budget},
                                                        {0, LeftOutReason::outside_buckets}}));
  EXPECT_EQ(read(*batching), (Lists{{3}}));
  BucketOptions strict = in_order({2, 20});
  strict.oversize = Oversize::error;
  expect_message(
      [&] { (void)bucket_batching(std::span<const std::int64_t>(sizes), columns, strict); },
      {"sample 1", "8"});
}

TEST(BucketBatching, FiguresAreOfTheBucketsOwnBatchSize) {
  const Ints sizes{1, 1, 9, 9, 7};
  const auto batching = buckets_of(sizes, in_order({0, 5, 10}, {4, 5}));
  const Ints batch{2, 3, 4};
  const BatchFigures figures = batching->figures(batch);
  EXPECT_DOUBLE_EQ(figures.load, 3.0 / 5);
  EXPECT_DOUBLE_EQ(figures.sizes, 25.0);
  EXPECT_DOUBLE_EQ(figures.padded, 27.0);
  EXPECT_DOUBLE_EQ(figures.work, 27.0);
}

TEST(BucketIndex, HasTheSamplesOfEachBucketInOrderWhetherDenseOrSparse) {
  Random random(5);
  constexpr std::size_t kSamples = 400'000;
  for (const std::uint32_t buckets : {1U, 3U, 100U, 500U, 20'000U}) {
    for (const bool sorted : {false, true}) {
      std::vector<std::uint32_t> bucket_of(kSamples);
      for (std::uint32_t& bucket : bucket_of) {
        // The last is none. Some buckets are sparse.
        bucket = static_cast<std::uint32_t>(any_int(random, 0, buckets));
        bucket = any_int(random, 0, 20) > 0 ? bucket % (buckets / 2 + 1) : bucket;
      }
      if (sorted) {
        std::sort(bucket_of.begin(), bucket_of.end());
      }
      const detail::BucketIndex index(buckets, kSamples,
                                      [&](std::size_t i) { return bucket_of[i]; });
      std::vector<Ints> expected(buckets + 1);
      for (std::size_t i = 0; i < kSamples; ++i) {
        expected[bucket_of[i]].push_back(static_cast<std::int64_t>(i));
      }
      for (std::uint32_t b = 0; b < buckets; ++b) {
        ASSERT_EQ(index.size(b), expected[b].size());
        std::vector<std::uint32_t> places(expected[b].size());
        std::iota(places.begin(), places.end(), 0U);
        std::shuffle(places.begin(), places.end(), random);
        Ints found(places.size());
        index.read(b, places, found.data());
        for (std::size_t i = 0; i < places.size(); ++i) {
          ASSERT_EQ(found[i], expected[b][places[i]]) << buckets << " bucket " << b;
        }
      }
    }
  }
}

TEST(BucketBatching, NoSamplesGiveNoBatches) {
  EXPECT_TRUE(read(*buckets_of(Ints{}, in_order({0, 1}, {1}))).empty());
}

TEST(BucketBatching, WrongArgumentIsAnErrorThatNamesIt) {
  const Ints sizes{1, 2};
  const auto make = [&](const BucketOptions& options) { (void)buckets_of(sizes, options); };
  expect_message([&] { make(in_order({}, {1})); }, {"bucket_boundaries", "at least two", "got 0"});
  expect_message([&] { make(in_order({1}, {1})); }, {"at least two", "got 1"});
  expect_message([&] { make(in_order({1, 3, 3}, {1, 1})); }, {"ascending", "got 3 ", "index 2"});
  expect_message([&] { make(in_order({1, std::nan("")}, {1})); }, {"finite", "nan", "index 1"});
  expect_message([&] { make(in_order({-HUGE_VAL, 1}, {1})); }, {"finite", "inf", "index 0"});
  expect_message([&] { make(in_order({0, HUGE_VAL, HUGE_VAL}, {1, 1})); }, {"finite", "index 1"});
  expect_message([&] { make(in_order({0, 1, 2}, {1})); }, {"batch_size", "2 buckets", "got 1"});
  expect_message([&] { make(in_order({0, 1, 2}, {1, 0})); }, {"batch_size", "positive", "got 0"});
  expect_message([&] { make(in_order({0, 1, 2})); }, {"batch_size or max_total_size"});
  const Columns<std::int64_t> columns{{sizes, Limit(Cost::sum(), std::int64_t{7})}};
  const std::span<const std::int64_t> span(sizes);
  expect_message([&] { (void)bucket_batching(span, columns, in_order({0, 1}, {1})); },
                 {"not both"});
  BucketOptions drop = in_order({0, 5});
  drop.drop_last = true;
  expect_message([&] { (void)bucket_batching(span, columns, drop); }, {"drop_last", "batch_size"});
  const Ints three{1, 2, 3};
  expect_message(
      [&] {
        (void)bucket_batching(std::span<const std::int64_t>(three), columns, in_order({0, 5}));
      },
      {"as many costs as sizes", "2 and 3"});
  expect_message([&] { (void)bucket_batching(span, Columns<double>{}, in_order({0, 5}, {1})); },
                 {"whole", "real"});
}

TEST(BucketBatching, WrongSizeIsAnErrorThatNamesItsIndex) {
  expect_message([] { (void)buckets_of(Ints{1, -2}, in_order({-5, 5}, {1})); },
                 {"not negative", "-2", "index 1"});
  expect_message([] { (void)buckets_of(Doubles{std::nan("")}, in_order({0, 5}, {1})); },
                 {"finite", "nan", "index 0"});
  // Sizes that only choose the bucket are held to the same.
  const Ints costs{1, 1};
  const Columns<std::int64_t> columns{{costs, Limit(Cost::sum(), std::int64_t{7})}};
  const Ints negative{1, -2};
  expect_message(
      [&] {
        (void)bucket_batching(std::span<const std::int64_t>(negative), columns, in_order({-5, 5}));
      },
      {"not negative", "-2", "index 1"});
  const Doubles real_costs{1, 1};
  const Doubles not_a_number{1, std::nan("")};
  expect_message(
      [&] {
        (void)bucket_batching(std::span<const double>(not_a_number),
                              Columns<double>{{real_costs, Limit(Cost::sum(), 7.0)}},
                              in_order({0, 5}));
      },
      {"finite", "nan", "index 1"});
}

}  // namespace
}  // namespace brim::batching
