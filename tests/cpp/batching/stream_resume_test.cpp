#include <brim/batching/stream.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "batching/reference.h"
#include "batching/stream_cases.h"

namespace brim::batching {
namespace {

using namespace reference;

/// Reads `steps` batches on each rank. The ranks agree on where they stand after each.
Lists read_steps(std::vector<BatchStream>& streams, std::int64_t steps) {
  Lists lists;
  for (std::int64_t step = 0; step < steps; ++step) {
    for (BatchStream& stream : streams) {
      const auto batch = stream.next();
      if (!batch) {
        ADD_FAILURE() << "a rank has fewer batches";
        return lists;
      }
      lists.emplace_back(batch->begin(), batch->end());
    }
    for (const BatchStream& stream : streams) {
      EXPECT_EQ(stream.position(), streams[0].position()) << "after step " << step;
    }
  }
  return lists;
}

/// Resumes at a position on all ranks; the rest is that of the uninterrupted run.
void expect_same_rest(const Case& some, const JobRun& whole, const Position& position,
                      std::size_t step) {
  SCOPED_TRACE("resumed at step " + std::to_string(step));
  std::vector<BatchStream> streams = start(*some.batching, 3, std::ssize(whole.ranks), &position);
  const JobRun rest = read(streams);
  for (std::size_t rank = 0; rank < whole.ranks.size(); ++rank) {
    const Lists& lists = whole.ranks[rank];
    ASSERT_EQ(rest.ranks[rank],
              Lists(lists.begin() + static_cast<std::ptrdiff_t>(step), lists.end()));
  }
}

TEST(ResumedStream, AtEveryPositionEqualsTheUninterruptedRun) {
  Random random(11);
  for (int trial = 0; trial < 120; ++trial) {
    const auto some = random_case(random, 120);
    const std::int64_t world_size = trial % 10 == 9 ? 16 : any_int(random, 1, 9);
    SCOPED_TRACE(some->name + " on " + std::to_string(world_size));
    std::vector<BatchStream> streams = start(*some->batching, 3, world_size);
    const JobRun whole = read(streams);
    std::vector<BatchStream> stepped = start(*some->batching, 3, world_size);
    for (std::size_t step = 0; step <= whole.ranks[0].size(); ++step) {
      const Position position = stepped[0].position();
      expect_same_rest(*some, whole, position, step);
      if (step > 0) {
        EXPECT_EQ(streams.back().position(static_cast<std::int64_t>(step)), position);
      }
      read_steps(stepped, step < whole.ranks[0].size() ? 1 : 0);
      ASSERT_FALSE(HasFailure());
    }
  }
}

TEST(ResumedStream, OverManyBlocksEqualsTheUninterruptedRun) {
  Random random(12);
  for (int trial = 0; trial < 60; ++trial) {
    const auto some = random_case(random, 12'000);
    const std::int64_t world_size = trial % 10 == 9 ? 16 : any_int(random, 1, 9);
    SCOPED_TRACE(some->name + " on " + std::to_string(world_size));
    std::vector<BatchStream> streams = start(*some->batching, 3, world_size);
    const JobRun whole = read(streams);
    const std::int64_t steps = std::ssize(whole.ranks[0]);
    for (const std::int64_t step :
         {std::int64_t{0}, any_int(random, 0, steps), any_int(random, 0, steps), steps}) {
      expect_same_rest(*some, whole, streams[0].position(step), static_cast<std::size_t>(step));
      EXPECT_EQ(streams.back().position(step), streams[0].position(step));
      ASSERT_FALSE(HasFailure());
    }
  }
}

TEST(ResumedStream, EveryPositionAroundTheEndOfABlock) {
  const Ints sizes(5000, 1);
  Case some;
  some.columns = Columns<std::int64_t>{{sizes, Limit(Cost::sum(), std::int64_t{3})}};
  some.batching = ordered_batching(some.columns);
  for (const std::int64_t world_size : {1, 2, 5, 7, 16}) {
    std::vector<BatchStream> streams = start(*some.batching, 3, world_size);
    const JobRun whole = read(streams);
    std::vector<BatchStream> stepped = start(*some.batching, 3, world_size);
    std::int64_t steps_after = 0;
    for (std::size_t step = 0; step < whole.ranks[0].size(); ++step) {
      steps_after = stepped[0].at_block_end() ? 2 : steps_after - 1;
      read_steps(stepped, 1);
      if (steps_after >= 0 || stepped[0].at_block_end()) {
        expect_same_rest(some, whole, stepped[0].position(), step + 1);
      }
      ASSERT_FALSE(HasFailure());
    }
  }
}

TEST(ResumedStream, StepsOverSeveralSmallBlocksHaveOnePositionOnAllRanks) {
  const Ints sizes(60'000, 1);
  Case some;
  some.columns = Columns<std::int64_t>{{sizes, Limit(Cost::sum(), std::int64_t{700})}};
  some.batching = ordered_batching(some.columns);
  for (const std::int64_t world_size : {2, 8, 16, 40}) {
    SCOPED_TRACE(world_size);
    std::vector<BatchStream> streams = start(*some.batching, 3, world_size);
    const JobRun whole = read(streams);
    std::vector<BatchStream> stepped = start(*some.batching, 3, world_size);
    for (std::size_t step = 1; step <= whole.ranks[0].size(); ++step) {
      read_steps(stepped, 1);
      expect_same_rest(some, whole, stepped[0].position(), step);
      ASSERT_FALSE(HasFailure());
    }
  }
}

TEST(ResumedStream, PositionOfAResumedStreamResumesToo) {
  Random random(13);
  for (int trial = 0; trial < 60; ++trial) {
    const auto some = random_case(random, trial % 2 == 0 ? 200 : 6000);
    const std::int64_t world_size = any_int(random, 1, 9);
    SCOPED_TRACE(some->name + " on " + std::to_string(world_size));
    std::vector<BatchStream> streams = start(*some->batching, 3, world_size);
    const JobRun whole = read(streams);
    Position position = start(*some->batching, 3, world_size)[0].position();
    for (std::int64_t done = 0, steps = std::ssize(whole.ranks[0]); done < steps;) {
      std::vector<BatchStream> part = start(*some->batching, 3, world_size, &position);
      const std::int64_t more = any_int(random, 0, 1 + (steps - done) / 2);
      read_steps(part, more);
      done += more;
      position = part[0].position();
      expect_same_rest(*some, whole, position, static_cast<std::size_t>(done));
      ASSERT_FALSE(HasFailure());
    }
  }
}

/// Jobs of different world sizes, one after the other, each from where the one before stopped.
void expect_all_once_over_jobs(const Case& some, Random& random, const Ints& world_sizes) {
  Lists done;
  Position position;
  for (std::size_t job = 0; job < world_sizes.size(); ++job) {
    SCOPED_TRACE("job " + std::to_string(job) + " on " + std::to_string(world_sizes[job]));
    const Position* from = job == 0 ? nullptr : &position;
    std::vector<BatchStream> streams = start(*some.batching, 4, world_sizes[job], from);
    const JobRun whole = read(streams);
    expect_equal_counts(whole);
    const Lists rest = whole.all();
    expect_fitting(some, rest);
    Lists all = done;
    all.insert(all.end(), rest.begin(), rest.end());
    expect_all_once(some, all, whole.left_out);

    std::vector<BatchStream> again = start(*some.batching, 4, world_sizes[job], from);
    const std::int64_t steps = any_int(random, 0, std::ssize(whole.ranks[0]));
    const Lists part = read_steps(again, steps);
    done.insert(done.end(), part.begin(), part.end());
    position = again[0].position();
    if (::testing::Test::HasFailure()) {
      return;
    }
  }
}

TEST(ResumedStream, ChangedNumberOfRanksLosesAndRepeatsNothing) {
  Random random(14);
  for (int trial = 0; trial < 600; ++trial) {
    const auto some = random_case(random, 300);
    Ints world_sizes = random_ints(random, any_int(random, 2, 5), 1, 9);
    if (trial % 4 == 0) {
      world_sizes[static_cast<std::size_t>(any_int(random, 0, 1))] = any_int(random, 10, 70);
    }
    SCOPED_TRACE("trial " + std::to_string(trial) + " " + some->name);
    expect_all_once_over_jobs(*some, random, world_sizes);
    ASSERT_FALSE(HasFailure());
  }
}

TEST(ResumedStream, ChangedNumberOfRanksOverManyBlocks) {
  Random random(15);
  for (int trial = 0; trial < 60; ++trial) {
    const auto some = random_case(random, 8000);
    Ints world_sizes = random_ints(random, 3, 1, 9);
    if (trial % 3 == 0) {
      world_sizes[1] = any_int(random, 10, 70);
    }
    SCOPED_TRACE("trial " + std::to_string(trial) + " " + some->name);
    expect_all_once_over_jobs(*some, random, world_sizes);
    ASSERT_FALSE(HasFailure());
  }
}

TEST(ResumedStream, MoreRanksThanTheRestOfABlockAndTheNextHaveSamplesFor) {
  // One rank has read nearly all of the first block, and the last block is small.
  const Ints sizes(2100, 9);
  Case some;
  some.columns = Columns<std::int64_t>{{sizes, Limit(Cost::sum(), std::int64_t{10})}};
  BucketOptions options;
  options.boundaries = {0, 10};
  const std::shared_ptr<const Batching> ways[] = {
      ordered_batching(some.columns),
      packed_batching(some.columns, {}, {.window = 1024, .oversize = Oversize::leave_out}),
      bucket_batching(std::span<const std::int64_t>(sizes), some.columns, options)};
  for (const auto& batching : ways) {
    some.batching = batching;
    std::vector<BatchStream> one = start(*batching, 0, 1);
    const Lists done = read_steps(one, 1000);
    const Position position = one[0].position();
    for (const std::int64_t world_size : {550, 700, 1090, 1300}) {
      SCOPED_TRACE(world_size);
      for (const std::int64_t rank : {std::int64_t{1}, world_size / 2, world_size - 1}) {
        BatchStream stream(*batching, 0, {rank, world_size});
        stream.seek(position);
        EXPECT_EQ(stream.count_rest(), 1100 / world_size);
      }
      BatchStream stream(*batching, 0, {0, world_size});
      stream.seek(position);
      Batches rest;
      stream.read_rest(rest, /*all_ranks=*/true);
      Lists all = lists_of(rest);
      EXPECT_EQ(std::ssize(all), 1100 / world_size * world_size);
      all.insert(all.end(), done.begin(), done.end());
      expect_all_once(some, all, stream.left_out());
    }
  }
}

TEST(ResumedStream, FewRanksGoOnWithABlockThatWasMadeForMany) {
  Random random(16);
  const Ints sizes = random_ints(random, 9000, 1, 10);
  Case some;
  some.columns = Columns<std::int64_t>{{sizes, Limit(Cost::sum(), std::int64_t{20})}};
  BucketOptions options;
  options.boundaries = {0, 4, 8, 11};
  const std::shared_ptr<const Batching> ways[] = {
      ordered_batching(some.columns, {.indices = {}, .shuffle = true}),
      packed_batching(some.columns, {}, {.window = 100, .oversize = Oversize::leave_out}),
      bucket_batching(std::span<const std::int64_t>(sizes), some.columns, options)};
  for (const auto& batching : ways) {
    some.batching = batching;
    std::vector<BatchStream> many = start(*batching, 0, 300);
    Lists all = read_steps(many, 3);
    const Position position = many[0].position();
    std::vector<BatchStream> few = start(*batching, 0, 2, &position);
    const JobRun rest = read(few);
    expect_equal_counts(rest);
    const Lists lists = rest.all();
    all.insert(all.end(), lists.begin(), lists.end());
    expect_all_once(some, all, rest.left_out);
  }
}

TEST(ResumedStream, WhatTooManyRanksLeftOutIsGivenToFewer) {
  const Ints sizes(7, 9);
  const auto batching =
      ordered_batching(Columns<std::int64_t>{{sizes, Limit(Cost::sum(), std::int64_t{10})}});
  std::vector<BatchStream> four = start(*batching, 0, 4);
  const JobRun run = read(four);
  ASSERT_EQ(run.left_out.size(), 3U);
  const Position end = four[0].position();
  std::vector<BatchStream> one = start(*batching, 0, 1, &end);
  const JobRun rest = read(one);
  EXPECT_EQ(sorted_indices(rest.all()), sorted_indices({indices_of(run.left_out)}));
  EXPECT_TRUE(rest.left_out.empty());
}

TEST(ResumedStream, PositionIsOnlyOfBatchesThatWereGiven) {
  const Ints sizes(100, 1);
  const auto batching =
      ordered_batching(Columns<std::int64_t>{{sizes, Limit(Cost::sum(), std::int64_t{10})}});
  BatchStream stream(*batching, 0);
  ASSERT_TRUE(stream.next() && stream.next());
  expect_message([&] { (void)stream.position(3); }, {"batches", "from 0 to", "2", "got 3"});
  expect_message([&] { (void)stream.position(-1); }, {"batches", "got -1"});
  expect_message([&] { stream.seek(BatchStream(*batching, 0).position()); },
                 {"before its first batch"});
}

TEST(ResumedStream, WrongPositionIsAnError) {
  Random random(17);
  const Ints sizes = random_ints(random, 50, 1, 10);
  const AnyColumns columns = Columns<std::int64_t>{{sizes, Limit(Cost::sum(), std::int64_t{20})}};
  BucketOptions options;
  options.boundaries = {0, 4, 11};
  const auto expect_wrong = [](const Batching& batching, const Position& position) {
    EXPECT_THROW(BatchStream(batching, 0).seek(position), std::invalid_argument);
  };
  const auto buckets = bucket_batching(std::span<const std::int64_t>(sizes), columns, options);
  const std::shared_ptr<const Batching> ways[] = {ordered_batching(columns),
                                                  packed_batching(columns), buckets};
  for (const auto& batching : ways) {
    const Position good = BatchStream(*batching, 0).position();
    const auto with_segment = [&](Position::Segment segment) {
      return Position{good.cursor, {segment}};
    };
    expect_wrong(*batching, {{}, {{1, 0, 0}}});
    Position other = good;
    other.cursor.back() = -1;
    expect_wrong(*batching, other);
    other = good;
    other.cursor[0] = -1;
    expect_wrong(*batching, other);
    expect_wrong(*batching, with_segment({0, 0, 0}));
    expect_wrong(*batching, with_segment({2, 2, 0}));
    expect_wrong(*batching, with_segment({2, -1, 1}));
    expect_wrong(*batching, with_segment({2, 1, 0}));
    expect_wrong(*batching, with_segment({1, 0, -1}));
    expect_wrong(*batching, with_segment({1, 0, 51}));
    expect_wrong(*batching, with_segment({2, 0, 52}));
    expect_wrong(*batching, with_segment({2, 1, kLargest}));
    expect_wrong(*batching, with_segment({kLargest, kLargest - 1, kLargest}));
    BatchStream same(*batching, 0);
    same.seek(good);
    EXPECT_EQ(read(same), read(*batching));
    BatchStream beginning(*batching, 0);
    beginning.seek({});
    EXPECT_EQ(read(beginning), read(*batching));
  }
  expect_wrong(*ways[0], {{0}, {}});
  expect_wrong(*ways[0], {{51, 1024}, {}});
  expect_wrong(*ways[0], {{0, 0}, {}});
  expect_wrong(*ways[1], {{51}, {}});
  expect_wrong(*ways[1], {{20, 50}, {}});
  expect_wrong(*ways[1], {{20, -1}, {}});
  expect_wrong(*ways[2], {{0, 0}, {}});
  expect_wrong(*ways[2], {{0, 0, 51}, {}});
  expect_wrong(*ways[2], {{0, -1, 0}, {}});
}

TEST(ResumedStream, ChunkOfAPositionMayBeAnything) {
  Random random(18);
  const Ints sizes = random_ints(random, 3000, 1, 10);
  const auto batching =
      ordered_batching(Columns<std::int64_t>{{sizes, Limit(Cost::sum(), std::int64_t{20})}});
  for (const std::int64_t chunk : {std::int64_t{1}, std::int64_t{7}, kLargest / 2, kLargest}) {
    BatchStream stream(*batching, 0);
    stream.seek({{0, chunk}, {}});
    EXPECT_EQ(sorted_indices(read(stream)), numbers_below(3000));
  }
}

TEST(PositionText, EveryPositionIsTheSameAgain) {
  Random random(21);
  for (int trial = 0; trial < 60; ++trial) {
    const auto made = random_case(random, 300);
    BatchStream stream(*made->batching, 7, {.rank = 0, .world_size = 1 + trial % 3});
    const std::int64_t steps = any_int(random, 0, 5);
    for (std::int64_t i = 0; i < steps && stream.next(); ++i) {
    }
    const std::string line = to_string(stream.position());
    EXPECT_EQ(line.find('\n'), std::string::npos);
    const Position loaded = parse_position(line);
    ASSERT_EQ(loaded, stream.position()) << line;
    BatchStream resumed(*made->batching, 7, {.rank = 0, .world_size = 1 + trial % 3});
    resumed.seek(loaded);
    ASSERT_EQ(read(resumed), read(stream)) << made->name;
  }
  const Position several{{3, -1}, {{4, 1, 7}, {2, 0, 6}}};
  EXPECT_EQ(to_string(several), "brim-position cursor 3 -1 segments 4 1 7 2 0 6 end");
  EXPECT_EQ(parse_position(to_string(several)), several);
  EXPECT_EQ(parse_position(to_string(Position{})), Position{});
}

TEST(PositionText, WrongLineIsAnErrorThatSaysWhatIsWrong) {
  const auto expect_refused = [](const std::string& line, const std::string& part) {
    expect_message([&] { (void)parse_position(line); }, {"a position must be a line", part});
  };
  expect_refused("", "expected brim-position, found \"\"");
  expect_refused("hello", "found \"hello\"");
  expect_refused("7 brim-position cursor segments end", "expected brim-position");
  expect_refused("brim-position cursor 3 5", "expected segments, found \"\"");
  expect_refused("brim-position cursor 3 segments 4 1 7", "expected end, found \"\"");
  expect_refused("brim-position cursor 3 segments 4 1 7 en", "found \"en\"");
  expect_refused("brim-position cursor 3 segments 4 1 end", "three numbers per segment");
  expect_refused("brim-position cursor 3x segments end", "found \"3x\"");
  expect_refused("brim-position cursor 99999999999999999999 segments end", "64 bits");
  expect_refused("brim-position cursor 3 segments end 4", "expected nothing more, found \"4\"");
}

}  // namespace
}  // namespace brim::batching
