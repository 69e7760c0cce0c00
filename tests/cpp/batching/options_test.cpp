#include <brim/batching/batching.h>
#include <brim/batching/sample_stream.h>
#include <brim/batching/stream.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "batching/reference.h"

namespace brim::batching {
namespace {

using namespace reference;

Lists batches_of(const Batching& batching, std::uint64_t seed = 0) {
  BatchStream stream(batching, seed);
  Lists result;
  while (auto batch = stream.next()) {
    result.emplace_back(batch->begin(), batch->end());
  }
  return result;
}

Ints random_sizes(Random& random) {
  Ints sizes(static_cast<std::size_t>(any_int(random, 0, 200)));
  for (std::int64_t& size : sizes) {
    size = any_int(random, 0, 30);
  }
  return sizes;
}

/// All ways to batch these sizes under a padded or summed budget of whole or real numbers.
template <class Check>
void for_each_way(const Ints& sizes, std::int64_t maximum, Oversize oversize, std::int64_t multiple,
                  const Check& check) {
  const Doubles real(sizes.begin(), sizes.end());
  for (const Cost& cost : {Cost::sum(), Cost::padded()}) {
    const bool padded = cost.kind() == Cost::Kind::padded;
    for (const bool shuffle : {false, true}) {
      const Order order{.shuffle = shuffle};
      const Limit limit(cost, maximum);
      const AnyColumns whole = Columns<std::int64_t>{{sizes, limit}};
      const AnyColumns reals = Columns<double>{{real, limit}};
      for (const AnyColumns& columns : {whole, reals}) {
        check(*ordered_batching(columns, order, oversize, multiple), padded);
        if (padded || multiple == 1) {
          check(*packed_batching(columns, order,
                                 {.window = 40, .oversize = oversize, .batch_multiple = multiple}),
                padded);
        }
      }
      check(*bucket_batching(SizeSpan<double>(real), reals,
                             {.boundaries = {0, 9, 20, 31},
                              .batch_sizes = {},
                              .shuffle = shuffle,
                              .oversize = oversize,
                              .batch_multiple = multiple}),
            padded);
    }
  }
}

double cost_of(const Ints& batch, const Ints& sizes, bool padded, std::int64_t most) {
  double sum = 0.0;
  double longest = 0.0;
  for (const std::int64_t sample : batch) {
    const auto size = static_cast<double>(std::min(sizes[static_cast<std::size_t>(sample)], most));
    sum += size;
    longest = std::max(longest, size);
  }
  return padded ? longest * static_cast<double>(batch.size()) : sum;
}

void expect_all_once(const Lists& batches, std::size_t samples) {
  std::vector<int> seen(samples);
  for (const Ints& batch : batches) {
    for (const std::int64_t sample : batch) {
      ++seen[static_cast<std::size_t>(sample)];
    }
  }
  EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), std::ssize(seen));
}

TEST(Oversize, AloneGivesEachABatchOfItsOwn) {
  Random random(1);
  for (int round = 0; round < 20; ++round) {
    const Ints sizes = random_sizes(random);
    for_each_way(sizes, 22, Oversize::alone, 1, [&](const Batching& batching, bool padded) {
      EXPECT_TRUE(batching.left_out().empty());
      const Lists batches = batches_of(batching, 5);
      expect_all_once(batches, sizes.size());
      for (const Ints& batch : batches) {
        if (batch.size() > 1) {
          EXPECT_LE(cost_of(batch, sizes, padded, 1000), 22);
        }
      }
    });
  }
}

TEST(Oversize, TruncateCountsTheLargestSizeThatFits) {
  Random random(2);
  for (int round = 0; round < 20; ++round) {
    const Ints sizes = random_sizes(random);
    for_each_way(sizes, 22, Oversize::truncate, 1, [&](const Batching& batching, bool padded) {
      EXPECT_TRUE(batching.left_out().empty());
      const Lists batches = batches_of(batching, 5);
      expect_all_once(batches, sizes.size());
      for (const Ints& batch : batches) {
        EXPECT_LE(cost_of(batch, sizes, padded, 22), 22);
      }
    });
  }
}

TEST(Oversize, OfSamplesReadOneByOne) {
  const auto batches = [](Oversize oversize) {
    Ints samples{3, 30, 4, 2, 50, 9};
    std::size_t next = 0;
    SampleStream<std::int64_t> stream(
        [&]() -> std::optional<std::int64_t> {
          return next < samples.size() ? std::optional(samples[next++]) : std::nullopt;
        },
        [](std::int64_t sample, std::span<double> sizes) {
          sizes[0] = static_cast<double>(sample);
        },
        {Limit(Cost::sum(), 10.0)}, oversize);
    Lists result;
    while (auto batch = stream.next()) {
      result.push_back(*batch);
    }
    return result;
  };
  EXPECT_EQ(batches(Oversize::alone), (Lists{{3}, {30}, {4, 2}, {50}, {9}}));
  EXPECT_EQ(batches(Oversize::truncate), (Lists{{3}, {30}, {4, 2}, {50}, {9}}));
  EXPECT_EQ(batches(Oversize::leave_out), (Lists{{3, 4, 2}, {9}}));
}

TEST(BatchMultiple, HoldsUnlessFewerFitOrAreLeft) {
  Random random(3);
  for (int round = 0; round < 20; ++round) {
    const Ints sizes = random_sizes(random);
    for_each_way(sizes, 90, Oversize::error, 4, [&](const Batching& batching, bool padded) {
      const Lists batches = batches_of(batching, 5);
      expect_all_once(batches, sizes.size());
      for (const Ints& batch : batches) {
        EXPECT_LE(cost_of(batch, sizes, padded, 1000), 90);
        EXPECT_TRUE(batch.size() % 4 == 0 || batch.size() < 4) << batch.size();
      }
    });
  }
}

TEST(BatchMultiple, LeavesBatchesAsLongAsTheyCanBe) {
  const Ints sizes(40, 1);
  const Columns<std::int64_t> columns{{sizes, Limit(Cost::padded(), std::int64_t{15})}};
  const auto counts = [](const Batching& batching) {
    Ints result;
    for (const Ints& batch : batches_of(batching)) {
      result.push_back(std::ssize(batch));
    }
    return result;
  };
  EXPECT_EQ(counts(*ordered_batching(columns, {}, {}, 8)), (Ints{8, 8, 8, 8, 8}));
  EXPECT_EQ(counts(*packed_batching(columns, {}, {.batch_multiple = 6})), (Ints{12, 12, 12, 4}));
  EXPECT_EQ(counts(*ordered_batching(columns, {}, {}, 16)), (Ints{15, 15, 10}));
}

TEST(BatchMultiple, WrongArgumentsAreRefused) {
  const Ints sizes(40, 1);
  const Columns<std::int64_t> summed{{sizes, Limit(Cost::sum(), std::int64_t{15})}};
  EXPECT_THROW((void)packed_batching(summed, {}, {.batch_multiple = 8}), std::invalid_argument);
  EXPECT_THROW((void)ordered_batching(summed, {}, {}, 0), std::invalid_argument);
}

}  // namespace
}  // namespace brim::batching
