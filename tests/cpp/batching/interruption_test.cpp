#include <brim/batching/batching.h>
#include <brim/batching/buckets.h>
#include <brim/batching/interruption.h>
#include <brim/batching/plan.h>
#include <brim/batching/stream.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <stdexcept>

#include "batching/reference.h"
#include "batching/stream_cases.h"

namespace brim::batching {
namespace {

using namespace reference;

struct Interrupted : std::exception {};

/// The number of checks while `work` runs.
template <class Work>
int checks_of(const Work& work) {
  int checks = 0;
  const InterruptionGuard guard([&] { ++checks; });
  work();
  return checks;
}

TEST(Interruption, InnermostGuardCountsAndNoneAfterwards) {
  int outer = 0;
  int inner = 0;
  {
    const InterruptionGuard first([&] { ++outer; });
    {
      const InterruptionGuard second([&] { ++inner; });
      check_interruption();
    }
    check_interruption();
  }
  check_interruption();
  EXPECT_EQ(outer, 1);
  EXPECT_EQ(inner, 1);
}

TEST(Interruption, LongCallsOfAllKindsLookForIt) {
  Random random(1);
  const Ints sizes = random_ints(random, 200'000, 1, 3000);
  const Columns<std::int64_t> columns{{sizes, Limit(Cost::padded(), std::int64_t{6000})}};
  const auto make = [&](std::int64_t kind) {
    return kind == 0   ? ordered_batching(columns)
           : kind == 1 ? packed_batching(columns)
           : kind == 2 ? packed_batching(columns, {}, {.window = std::nullopt})
                       : bucket_batching(SizeSpan<std::int64_t>(sizes), columns,
                                         {.boundaries = {0, 100, 4000}, .batch_sizes = {}});
  };
  for (const std::int64_t kind : {0, 1, 2, 3}) {
    EXPECT_GT(checks_of([&] { make(kind); }), 0) << kind;
    const auto batching = make(kind);
    EXPECT_GT(checks_of([&] { (void)BatchStream(*batching, 0).count_rest(); }), 5) << kind;
    EXPECT_GT(checks_of([&] { (void)report(*batching, 0, 2); }), 5) << kind;
  }
  EXPECT_GT(checks_of([&] { (void)least_padding_boundaries(sizes, 20); }), 10);
}

TEST(Interruption, InterruptedStreamGoesOnAsIfNothingHadHappened) {
  Random random(2);
  for (int trial = 0; trial < 60; ++trial) {
    const auto some = random_case(random, 6000);
    const Ranks ranks{.rank = trial % 3, .world_size = 3};
    const Lists expected = read(*some->batching, 7, ranks);
    const std::int64_t first = any_int(random, 1, 30);
    std::int64_t after = first;  // the number of checks
    BatchStream stream(*some->batching, 7, ranks);
    Lists batches;
    while (true) {
      const Position before = stream.position();
      std::int64_t checks = 0;
      const InterruptionGuard guard([&] {
        if (++checks == after) {
          throw Interrupted();
        }
      });
      try {
        const auto batch = stream.next();
        if (!batch) {
          break;
        }
        batches.emplace_back(batch->begin(), batch->end());
        after = first;
      } catch (const Interrupted&) {
        after = 2 * after + 1;  // so that a long block comes to its end too
        ASSERT_EQ(stream.position(), before) << some->name;
        ASSERT_EQ(stream.given(), std::ssize(batches));
      }
    }
    ASSERT_EQ(batches, expected) << some->name;
    BatchStream whole(*some->batching, 7, ranks);
    (void)whole.count_rest();
    ASSERT_EQ(stream.left_out(), whole.left_out()) << some->name;
  }
}

}  // namespace
}  // namespace brim::batching
