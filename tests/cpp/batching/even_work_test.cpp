#include <brim/batching/balance.h>
#include <brim/batching/even_work.h>
#include <brim/batching/plan.h>
#include <brim/batching/stream.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <set>
#include <stdexcept>
#include <vector>

#include "batching/reference.h"

namespace brim::batching {
namespace {

using namespace reference;

/// Documents of all lengths under a budget in tokens, and their work.
struct Documents {
  Documents(Random& random, std::int64_t count, std::int64_t budget, std::int64_t window,
            std::int64_t most_samples = 0)
      : lengths(static_cast<std::size_t>(count)), work(lengths.size()) {
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      const double share = static_cast<double>(any_int(random, 0, 1000)) / 1000;
      lengths[i] = static_cast<std::int64_t>(8 * std::exp(share * share * 5));
      work[i] = flops(static_cast<double>(lengths[i]), 100);
    }
    columns = Columns<std::int64_t>{{lengths, {Cost::sum(), budget}}};
    if (most_samples > 0) {
      std::get<0>(columns).push_back({lengths, {Cost::count(), most_samples}});
    }
    packed = packed_batching(columns, {.shuffle = true}, {.window = window});
    even = even_work(packed, columns, work);
  }

  std::vector<std::int64_t> lengths;
  Doubles work;
  AnyColumns columns;
  std::shared_ptr<const Batching> packed;
  std::shared_ptr<const Batching> even;
};

Lists rest_of(BatchStream& stream) {
  Lists result;
  while (const auto batch = stream.next()) {
    result.emplace_back(batch->begin(), batch->end());
  }
  return result;
}

/// The batches of each rank, from a position on.
std::vector<Lists> shares_of(const Batching& batching, std::int64_t world_size,
                             const Position& from = {}) {
  std::vector<Lists> result;
  for (std::int64_t rank = 0; rank < world_size; ++rank) {
    BatchStream stream(batching, 7, {.rank = rank, .world_size = world_size});
    if (!from.cursor.empty()) {
      stream.seek(from);
    }
    result.push_back(rest_of(stream));
  }
  return result;
}

TEST(EvenWork, KeepsTheBudgetAndGivesEachSampleOnce) {
  Random random(1);
  for (int round = 0; round < 60; ++round) {
    const std::int64_t budget = any_int(random, 900, 6000);  // some are over it by themselves
    const Documents documents(random, any_int(random, 1, 1500), budget, any_int(random, 50, 700),
                              round % 4 == 0 ? any_int(random, 3, 40) : 0);
    const std::int64_t world = any_int(random, 1, 9);
    const std::vector<Lists> shares = shares_of(*documents.even, world);
    std::vector<std::int64_t> seen;
    for (const Lists& share : shares) {
      EXPECT_EQ(share.size(), shares[0].size());
      for (const Ints& batch : share) {
        std::int64_t total = 0;
        for (const std::int64_t sample : batch) {
          total += documents.lengths[static_cast<std::size_t>(sample)];
        }
        EXPECT_LE(total, budget);
        EXPECT_FALSE(batch.empty());
        if (round % 4 == 0) {
          EXPECT_LE(std::ssize(batch), std::get<0>(documents.columns)[1].limit.whole());
        }
        seen.insert(seen.end(), batch.begin(), batch.end());
      }
    }
    for (const LeftOut& sample : report(*documents.even, 7, world).left_out) {
      seen.push_back(sample.index);
    }
    std::ranges::sort(seen);
    std::vector<std::int64_t> all(documents.lengths.size());
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(seen, all);
  }
}

TEST(EvenWork, EvensOutWhatAFullBatchHasToDo) {
  Random random(2);
  const Documents documents(random, 20'000, 4096, 5000);
  for (const std::int64_t world : {2, 8, 32}) {
    const PlanReport even = report(*documents.even, 7, world);
    const PlanReport packed = report(*documents.packed, 7, world);
    EXPECT_EQ(even.batches, packed.batches);
    double before = 0.0;  // the same measure of the batches as they were
    BatchStream stream(*documents.packed, 7, {.rank = 0, .world_size = world});
    Batches batches;
    stream.read_rest(batches, true);
    for (std::size_t b = 0; b < batches.count(); b += static_cast<std::size_t>(world)) {
      double sum = 0.0;
      double most = 0.0;
      for (std::size_t i = b; i < b + static_cast<std::size_t>(world); ++i) {
        const double own = documents.even->figures(batches[i]).work;
        sum += own;
        most = std::max(most, own);
      }
      before += most * static_cast<double>(world) / sum - 1;
    }
    before /= static_cast<double>(batches.count()) / static_cast<double>(world);
    EXPECT_LT(even.imbalance, before / 4) << world;
  }
}

TEST(EvenWork, OneRankGetsThePackedBatches) {
  Random random(3);
  const Documents documents(random, 800, 4096, 200);
  EXPECT_EQ(shares_of(*documents.even, 1), shares_of(*documents.packed, 1));
}

TEST(EvenWork, ResumesAnywhereWithAnyNumberOfRanks) {
  Random random(4);
  for (int round = 0; round < 12; ++round) {
    const Documents documents(random, 900, 2500, any_int(random, 60, 400));
    const std::int64_t world = any_int(random, 2, 5);
    const std::vector<Lists> whole = shares_of(*documents.even, world);
    for (std::size_t done = 0; done <= whole[0].size(); done += 1 + whole[0].size() / 7) {
      BatchStream stream(*documents.even, 7, {.rank = 1, .world_size = world});
      for (std::size_t i = 0; i < done; ++i) {
        (void)stream.next();
      }
      const Position position = stream.position();
      const std::vector<Lists> rest = shares_of(*documents.even, world, position);
      std::multiset<std::int64_t> left;
      for (std::size_t rank = 0; rank < rest.size(); ++rank) {
        EXPECT_EQ(rest[rank], Lists(whole[rank].begin() + static_cast<std::ptrdiff_t>(done),
                                    whole[rank].end()));
        for (const Ints& batch : rest[rank]) {
          left.insert(batch.begin(), batch.end());
        }
      }
      std::multiset<std::int64_t> others;
      for (const Lists& share : shares_of(*documents.even, world + 1, position)) {
        for (const Ints& batch : share) {
          others.insert(batch.begin(), batch.end());
        }
      }
      EXPECT_EQ(left, others);
    }
  }
}

TEST(EvenWork, WrongArgumentsAreNamed) {
  const std::vector<std::int64_t> lengths{1, 2};
  const Columns<std::int64_t> sums{{lengths, {Cost::sum(), std::int64_t{4}}}};
  const Columns<std::int64_t> padded{{lengths, {Cost::padded(), std::int64_t{4}}}};
  const Doubles work{1.0, 2.0};
  EXPECT_EQ(message([&] { (void)even_work(packed_batching(sums), sums, Doubles{1.0}); }),
            "work must be as many as sizes, 2, got 1");
  EXPECT_EQ(message([&] { (void)even_work(packed_batching(sums), sums, Doubles{1.0, -1.0}); }),
            "work must be finite and not negative, got -1 at index 1");
  EXPECT_EQ(message([&] { (void)even_work(packed_batching(padded), padded, work); }),
            "work needs a budget with cost=\"sum\": padded samples cost what the longest does, as "
            "cost=\"flops\" says");
}

}  // namespace
}  // namespace brim::batching
