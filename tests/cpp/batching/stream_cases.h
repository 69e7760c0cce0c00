#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "batching/reference.h"

// Batchings of every kind, for what has to hold for all of them.

namespace brim::batching::reference {

/// Owns the sizes that its batching refers to.
struct Case {
  std::string name;
  std::vector<Ints> ints;
  std::vector<Doubles> doubles;
  Doubles boundaries;  // of buckets
  AnyColumns columns;
  std::shared_ptr<const Batching> batching;

  [[nodiscard]] bool fits(std::span<const std::int64_t> batch) const {
    return std::visit([&](const auto& some) { return within(some, batch); }, columns);
  }
};

/// A few hundred samples at most take one block; some thousands several.
inline std::unique_ptr<Case> random_case(Random& random, std::int64_t most_samples) {
  auto result = std::make_unique<Case>();
  const std::int64_t samples = any_int(random, 0, most_samples);
  const bool real = any_int(random, 0, 2) == 0;
  const bool two = any_int(random, 0, 3) == 0;
  const std::int64_t low = any_int(random, 0, 1);
  const std::int64_t high = any_int(random, 1, 60);
  // From nearly all singletons up to batches of hundreds; now and then some are over the budget.
  const std::int64_t maximum = any_int(random, std::max<std::int64_t>(1, high * 4 / 5), 40 * high);
  const Cost costs[] = {Cost::sum(), Cost::padded(), Cost::count(), Cost::padded_squared()};
  const auto kind = static_cast<std::size_t>(any_int(random, 0, 3));
  const std::int64_t scaled = kind == 3 ? maximum * high : kind == 2 ? 1 + maximum / 20 : maximum;
  const auto add = [&](const Cost& cost, std::int64_t limit) {
    if (real) {
      result->doubles.push_back(random_quarters(random, samples, low, high));
    } else {
      result->ints.push_back(random_ints(random, samples, low, high));
    }
    if (real && result->doubles.size() == 1) {
      result->columns = Columns<double>{};
    }
    return std::pair{cost, limit};
  };
  std::vector<std::pair<Cost, std::int64_t>> limits{add(costs[kind], scaled)};
  if (two) {
    limits.push_back(add(Cost::sum(), maximum * 2));
  }
  for (std::size_t c = 0; c < limits.size(); ++c) {
    const Limit limit(limits[c].first, limits[c].second);
    if (real) {
      std::get<Columns<double>>(result->columns).push_back({result->doubles[c], limit});
    } else {
      std::get<Columns<std::int64_t>>(result->columns).push_back({result->ints[c], limit});
    }
  }
  const bool shuffle = any_int(random, 0, 1) == 0;
  result->name = std::to_string(samples) + " samples to " + std::to_string(high) +
                 (real ? " real" : " whole") + (two ? " twice" : "") + " cost " +
                 std::to_string(kind) + " limit " + std::to_string(scaled) +
                 (shuffle ? " shuffled" : "");
  const std::int64_t way = any_int(random, 0, 2);
  if (way == 0) {
    result->name = "ordered " + result->name;
    result->batching = ordered_batching(result->columns, {.indices = {}, .shuffle = shuffle});
  } else if (way == 1) {
    PackOptions options;
    options.window = any_int(random, 1, 400);
    if (any_int(random, 0, 5) == 0) {
      options.window = std::nullopt;
    }
    result->name = "packed " + std::to_string(options.window.value_or(0)) + " " + result->name;
    result->batching =
        packed_batching(result->columns, {.indices = {}, .shuffle = shuffle}, options);
  } else {
    BucketOptions options;
    options.shuffle = shuffle;
    // Now and then the longest samples lie in no bucket.
    for (std::int64_t at = 0; at <= high; at += 1 + any_int(random, 0, high)) {
      options.boundaries.push_back(static_cast<double>(at));
    }
    options.boundaries.push_back(
        0.5 + (any_int(random, 0, 4) == 0 ? options.boundaries.back() : static_cast<double>(high)));
    result->boundaries = options.boundaries;
    AnyColumns columns = result->columns;
    if (any_int(random, 0, 1) == 0) {
      options.drop_last = any_int(random, 0, 1) == 0;
      options.batch_sizes = random_ints(
          random, static_cast<std::int64_t>(options.boundaries.size()) - 1, 1, 1 + maximum / 30);
      std::visit([](auto& some) { some.clear(); }, columns);
      std::visit([](auto& some) { some.clear(); }, result->columns);
      result->name = (options.drop_last ? "drop_last " : "batch_sizes ") + result->name;
    }
    result->name = "buckets " + result->name;
    result->batching =
        real ? bucket_batching(std::span<const double>(result->doubles[0]), columns, options)
             : bucket_batching(std::span<const std::int64_t>(result->ints[0]), columns, options);
  }
  return result;
}

/// The batches of all ranks, and what they leave out.
struct JobRun {
  std::vector<Lists> ranks;
  std::vector<LeftOut> left_out;

  [[nodiscard]] Lists all() const {
    Lists lists;
    for (const Lists& rank : ranks) {
      lists.insert(lists.end(), rank.begin(), rank.end());
    }
    return lists;
  }
};

/// Streams of all ranks of a job, at the beginning or at a position.
inline std::vector<BatchStream> start(const Batching& batching, std::uint64_t seed,
                                      std::int64_t world_size, const Position* position = nullptr) {
  std::vector<BatchStream> streams;
  for (std::int64_t rank = 0; rank < world_size; ++rank) {
    streams.emplace_back(batching, seed, Ranks{rank, world_size});
    if (position != nullptr) {
      streams.back().seek(*position);
    }
  }
  return streams;
}

inline JobRun read(std::vector<BatchStream>& streams) {
  JobRun run;
  for (BatchStream& stream : streams) {
    run.ranks.push_back(read(stream));
    if (run.ranks.size() == 1) {
      run.left_out = stream.left_out();
    }
    EXPECT_EQ(stream.left_out(), run.left_out) << "every rank reports the same";
  }
  return run;
}

inline void expect_equal_counts(const JobRun& run) {
  for (const Lists& rank : run.ranks) {
    EXPECT_EQ(rank.size(), run.ranks[0].size());
  }
}

/// Each sample of the case is in one of the batches or left out, once.
inline void expect_all_once(const Case& some, Lists batches, const std::vector<LeftOut>& left_out) {
  batches.push_back(indices_of(some.batching->left_out()));
  batches.push_back(indices_of(left_out));
  EXPECT_EQ(sorted_indices(batches), numbers_below(some.batching->samples()));
}

inline void expect_fitting(const Case& some, const Lists& batches) {
  for (const Ints& batch : batches) {
    ASSERT_FALSE(batch.empty());
    ASSERT_TRUE(some.fits(batch));
  }
}

}  // namespace brim::batching::reference
