#include <brim/batching/look_ahead.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>
#include <set>
#include <stdexcept>
#include <vector>

#include "batching/reference.h"

namespace brim::batching {
namespace {

using namespace reference;
using Stream = LookAheadStream<std::int64_t>;

/// Samples are their own numbers.
struct Data {
  Doubles sizes;
  std::int64_t next = 0;

  std::unique_ptr<Stream> stream(std::vector<Limit> limits, const LookAheadOptions& options,
                                 Ranks ranks = {}) {
    next = 0;
    return std::make_unique<Stream>(
        [this]() -> std::optional<std::int64_t> {
          return std::cmp_less(next, sizes.size()) ? std::optional(next++) : std::nullopt;
        },
        [this](std::int64_t sample, std::span<double> out) {
          out[0] = sizes[static_cast<std::size_t>(sample)];
        },
        std::move(limits), options, ranks);
  }
};

std::vector<Limit> budget(Cost cost, double maximum) { return {Limit(std::move(cost), maximum)}; }

Lists rest_of(Stream& stream) {
  Lists result;
  while (auto batch = stream.next()) {
    result.push_back(*batch);
  }
  return result;
}

Doubles random_sizes(Random& random, std::int64_t count) {
  Doubles sizes(static_cast<std::size_t>(count));
  for (double& size : sizes) {
    size = static_cast<double>(any_int(random, 1, 30));
  }
  return sizes;
}

Ints sorted_samples(const Lists& batches) {
  Ints samples;
  for (const Ints& batch : batches) {
    samples.insert(samples.end(), batch.begin(), batch.end());
  }
  std::sort(samples.begin(), samples.end());
  return samples;
}

Ints all_of(std::size_t count) {
  Ints all(count);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

TEST(LookAheadStream, BatchesHaveAMultipleUnlessFewerFitOrAreLeft) {
  Random random(2);
  for (int round = 0; round < 60; ++round) {
    Data data{random_sizes(random, any_int(random, 0, 300))};
    const auto limit = static_cast<double>(any_int(random, 30, 200));
    const std::int64_t multiple = any_int(random, 2, 8);
    const auto options = [&](std::int64_t waiting, Doubles boundaries) {
      return LookAheadOptions{
          .samples = waiting, .boundaries = std::move(boundaries), .batch_multiple = multiple};
    };
    for (const bool buckets : {false, true}) {
      const std::int64_t waiting = buckets ? 100'000 : any_int(random, 20, 120);
      const auto stream = data.stream(budget(Cost::padded(), limit),
                                      options(waiting, buckets ? Doubles{1, 9, 31} : Doubles{}));
      const Lists batches = rest_of(*stream);
      EXPECT_EQ(sorted_samples(batches), all_of(data.sizes.size()));
      for (const Ints& batch : batches) {
        double longest = 0.0;
        for (const std::int64_t sample : batch) {
          longest = std::max(longest, data.sizes[static_cast<std::size_t>(sample)]);
        }
        EXPECT_LE(longest * static_cast<double>(batch.size()), limit);
        EXPECT_TRUE(std::ssize(batch) % multiple == 0 || std::ssize(batch) < multiple);
      }
    }
  }
}

TEST(LookAheadStream, BucketsOfAMultipleAreAsLongAsTheyCanBe) {
  Data data{Doubles(40, 1.0)};
  const auto stream =
      data.stream(budget(Cost::padded(), 15.0), {.boundaries = {0, 2}, .batch_multiple = 6});
  Ints counts;
  for (const Ints& batch : rest_of(*stream)) {
    counts.push_back(std::ssize(batch));
  }
  EXPECT_EQ(counts, (Ints{12, 12, 12, 4}));
}

TEST(LookAheadStream, AMultipleResumesAnywhere) {
  Random random(3);
  Data data{random_sizes(random, 200)};
  const LookAheadOptions options{.samples = 30, .boundaries = {1, 9, 31}, .batch_multiple = 4};
  const auto whole = data.stream(budget(Cost::padded(), 90.0), options);
  const Lists all = rest_of(*whole);
  for (std::size_t done = 0; done <= all.size(); ++done) {
    const auto stream = data.stream(budget(Cost::padded(), 90.0), options);
    for (std::size_t i = 0; i < done; ++i) {
      (void)stream->next();
    }
    const Position position = stream->position(static_cast<std::int64_t>(done));
    const auto resumed = data.stream(budget(Cost::padded(), 90.0), options);
    resumed->seek(position);
    EXPECT_EQ(rest_of(*resumed), Lists(all.begin() + static_cast<std::ptrdiff_t>(done), all.end()));
  }
}

TEST(LookAheadStream, WrongMultiplesAreRefused) {
  Data data{Doubles(4, 1.0)};
  EXPECT_THROW((void)data.stream(budget(Cost::sum(), 15.0), {.batch_multiple = 8}),
               std::invalid_argument);
  EXPECT_THROW(
      (void)data.stream(budget(Cost::padded(), 15.0), {.boundaries = {0, 2}, .batch_multiple = 0}),
      std::invalid_argument);
}

/// Documents are their numbers, parts of them have bounds too.
struct Piece {
  std::int64_t document;
  std::int64_t begin;
  std::int64_t end;

  friend auto operator<=>(const Piece&, const Piece&) = default;
};

TEST(LookAheadStream, SplitsDocumentsWithoutLosingATokenAndResumesAnywhere) {
  Random random(5);
  for (int round = 0; round < 40; ++round) {
    const Doubles sizes = random_sizes(random, any_int(random, 1, 60));
    const LookAheadOptions options{.samples = any_int(random, 1, 30),
                                   .oversize = Oversize::split,
                                   .size_multiple = any_int(random, 1, 4)};
    const std::int64_t most = any_int(random, options.size_multiple, 20);
    const auto rounded = [&](std::int64_t size) {
      return (size + options.size_multiple - 1) / options.size_multiple * options.size_multiple;
    };
    std::int64_t next = 0;
    const auto open = [&](Ranks ranks) {
      next = 0;
      return std::make_unique<LookAheadStream<Piece>>(
          [&]() -> std::optional<Piece> {
            if (std::cmp_equal(next, sizes.size())) {
              return std::nullopt;
            }
            const auto size = static_cast<std::int64_t>(sizes[static_cast<std::size_t>(next)]);
            return Piece{next++, 0, size};
          },
          [](const Piece& piece, std::span<double> out) {
            out[0] = static_cast<double>(piece.end - piece.begin);
          },
          budget(Cost::sum(), static_cast<double>(most)), options, ranks,
          [](const Piece& piece, std::int64_t begin, std::int64_t end, std::int64_t size) {
            EXPECT_EQ(size, piece.end);
            return Piece{piece.document, begin, end};
          });
    };
    using Packs = std::vector<std::vector<Piece>>;
    const auto rest = [](LookAheadStream<Piece>& stream) {
      Packs packs;
      while (auto pack = stream.next()) {
        packs.push_back(std::move(*pack));
      }
      return packs;
    };
    const Packs all = rest(*open({}));
    std::vector<Piece> pieces;
    for (const auto& pack : all) {
      std::int64_t places = 0;
      for (const Piece& piece : pack) {
        places += rounded(piece.end - piece.begin);
        pieces.push_back(piece);
      }
      EXPECT_LE(places, most);
    }
    std::sort(pieces.begin(), pieces.end());
    auto piece = pieces.begin();
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      std::int64_t begin = 0;
      for (; piece != pieces.end() && std::cmp_equal(piece->document, i); ++piece) {
        EXPECT_EQ(piece->begin, begin);
        begin = piece->end;
      }
      EXPECT_EQ(static_cast<double>(begin), sizes[i]);
    }
    EXPECT_EQ(piece, pieces.end());
    for (std::size_t done = 0; done <= all.size(); ++done) {
      const auto stream = open({});
      for (std::size_t i = 0; i < done; ++i) {
        (void)stream->next();
      }
      const Position position = stream->position(static_cast<std::int64_t>(done));
      const auto resumed = open({});
      resumed->seek(position);
      EXPECT_EQ(rest(*resumed), Packs(all.begin() + static_cast<std::ptrdiff_t>(done), all.end()));
    }
  }
}

TEST(LookAheadStream, WhatCannotBeSplitIsRefused) {
  Data data{Doubles{3.0, 9.5}};
  const LookAheadOptions split{.oversize = Oversize::split};
  EXPECT_EQ(message([&] { (void)data.stream(budget(Cost::sum(), 5.0), split); }),
            "oversize \"split\" needs a function that cuts samples");
  EXPECT_EQ(
      message(
          [&] { (void)data.stream({Limit(Cost::sum(), 5.0), Limit(Cost::sum(), 7.0)}, split); }),
      "oversize \"split\" needs one max_total_size: samples of several sizes cannot be cut by "
      "one of them");
  EXPECT_EQ(message([&] {
              (void)data.stream(budget(Cost::sum(), 5.0),
                                {.oversize = Oversize::split, .size_multiple = 8});
            }),
            "samples cannot be cut into parts that fit: the largest size that fits max_total_size "
            "is 5, and parts are multiples of 8");
  Stream fractions(
      [&]() -> std::optional<std::int64_t> {
        return data.next < 2 ? std::optional(data.next++) : std::nullopt;
      },
      [&](std::int64_t sample, std::span<double> out) {
        out[0] = data.sizes[static_cast<std::size_t>(sample)];
      },
      budget(Cost::sum(), 5.0), split, {}, [](std::int64_t sample, auto...) { return sample; });
  EXPECT_EQ(message([&] { (void)fractions.next(); }),
            "sizes must be whole numbers for oversize \"split\", got 9.5 for sample 1");
}

TEST(LookAheadStream, PacksAsTheWindowedPacker) {
  Random random(1);
  for (int round = 0; round < 60; ++round) {
    const std::int64_t samples = any_int(random, 0, 300);
    const std::int64_t window = any_int(random, 1, 120);
    Data data{random_sizes(random, samples)};
    for (const Cost& cost : {Cost::sum(), Cost::padded(), Cost::padded_squared()}) {
      const Limit limit(cost, static_cast<double>(any_int(random, 20, 160)) / 2);
      const Oversize oversize = round % 2 == 0 ? Oversize::truncate : Oversize::leave_out;
      const Ints whole(data.sizes.begin(), data.sizes.end());  // as most samplers have them
      const auto packed = packed_batching(Columns<std::int64_t>{{whole, limit}}, {},
                                          {.window = window, .oversize = oversize});
      BatchStream expected(*packed, 0);
      Lists batches;
      while (auto batch = expected.next()) {
        batches.emplace_back(batch->begin(), batch->end());
      }
      const auto stream = data.stream({limit}, {.samples = window, .oversize = oversize});
      EXPECT_EQ(rest_of(*stream), batches);
      EXPECT_EQ(stream->left_out(), packed->left_out());
    }
  }
}

TEST(LookAheadStream, ResumesWithAnyNumberOfRanksAndLosesNothing) {
  Random random(2);
  for (int round = 0; round < 150; ++round) {
    Data data{random_sizes(random, any_int(random, 0, 400))};
    LookAheadOptions options{.samples = any_int(random, 1, 90), .shuffle = round % 3 == 0};
    if (round % 2 == 0) {
      options.boundaries = {0, 8, 17, 28};
    }
    const auto limits = budget(round % 4 < 2 ? Cost::sum() : Cost::padded(),
                               static_cast<double>(any_int(random, 30, 90)));
    Lists done;
    Position position;
    const std::int64_t before = any_int(random, 1, 4);
    const std::int64_t steps = any_int(random, 0, 12);
    for (std::int64_t rank = 0; rank < before; ++rank) {
      const auto stream = data.stream(limits, options, {rank, before});
      std::optional<Ints> batch;
      while (stream->given() < steps && (batch = stream->next())) {
        done.push_back(*batch);
      }
      const Position here = stream->position(stream->given());
      EXPECT_TRUE(rank == 0 || here == position) << "the same on every rank";
      position = here;
    }
    Ints lost;
    const std::int64_t after = any_int(random, 1, 4);
    for (std::int64_t rank = 0; rank < after; ++rank) {
      const auto stream = data.stream(limits, options, {rank, after});
      stream->seek(position);
      const Lists rest = rest_of(*stream);
      done.insert(done.end(), rest.begin(), rest.end());
      lost.clear();
      for (const LeftOut& sample : stream->left_out()) {
        if (sample.reason == LeftOutReason::too_few_for_ranks) {
          lost.push_back(sample.index);
        }
      }
      EXPECT_LT(std::ssize(lost), after);
    }
    for (std::size_t i = 0; i < data.sizes.size(); ++i) {
      if (!options.boundaries.empty() && data.sizes[i] >= options.boundaries.back()) {
        lost.push_back(static_cast<std::int64_t>(i));
      }
    }
    done.push_back(lost);
    EXPECT_EQ(sorted_samples(done), all_of(data.sizes.size())) << "round " << round;
  }
}

TEST(LookAheadStream, BucketsKeepBoundariesAndTheirLookAhead) {
  Random random(3);
  for (int round = 0; round < 40; ++round) {
    Data data{random_sizes(random, 500)};
    const std::int64_t most = any_int(random, 1, 60);
    const auto stream =
        data.stream(budget(Cost::padded(), 100), {.samples = most, .boundaries = {0, 10, 20, 31}});
    Lists batches;
    while (auto batch = stream->next()) {
      std::set<int> buckets;
      for (const std::int64_t sample : *batch) {
        buckets.insert(
            std::min(static_cast<int>(data.sizes[static_cast<std::size_t>(sample)]) / 10, 2));
      }
      EXPECT_EQ(buckets.size(), 1U);
      batches.push_back(*batch);
    }
    EXPECT_EQ(sorted_samples(batches), all_of(500));
  }
}

TEST(LookAheadStream, ReadsNoFurtherThanItLooksAhead) {
  Data data{Doubles(100'000, 1.0)};
  for (const bool buckets : {false, true}) {
    LookAheadOptions options{.samples = 100};
    if (buckets) {
      options.boundaries = {0, 2};
    }
    const auto stream = data.stream(budget(Cost::sum(), 10), options);
    std::int64_t given = 0;
    for (int batch = 0; batch < 200; ++batch) {
      given += static_cast<std::int64_t>(stream->next()->size());
      EXPECT_LE(stream->samples_read(), given + (buckets ? 1000 : 200));
    }
  }
}

TEST(LookAheadStream, SkippedBatchesAreThoseOfOtherLoaders) {
  Random random(4);
  Data data{random_sizes(random, 300)};
  const LookAheadOptions options{.samples = 50};
  const auto whole = data.stream(budget(Cost::sum(), 60), options);
  const Lists expected = rest_of(*whole);
  const auto odd = data.stream(budget(Cost::sum(), 60), options);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (i % 2 == 0) {
      EXPECT_TRUE(odd->skip());
    } else {
      EXPECT_EQ(odd->next(), expected[i]);
    }
  }
  EXPECT_FALSE(odd->skip());
}

TEST(LookAheadStream, FingerprintsTellWhetherTheSizesAreTheSame) {
  const auto of = [](const Doubles& sizes, std::int64_t lookahead) {
    Data data{sizes};
    const auto stream = data.stream(budget(Cost::sum(), 100), {.samples = lookahead});
    EXPECT_EQ(sorted_samples(rest_of(*stream)), all_of(sizes.size()));
    return stream->fingerprints();
  };
  const Doubles sizes{3, 1, 4, 1, 5, 9};
  const auto first = of(sizes, 2);
  ASSERT_EQ(first.size(), 4U);  // of 1, 2, 4 and all 6
  EXPECT_EQ(of(sizes, 100), first);
  const auto other = of({3, 1, 4, 1, 9, 5}, 2);
  EXPECT_TRUE(std::equal(first.begin(), first.end() - 1, other.begin()));
  EXPECT_NE(other.back(), first.back());
  EXPECT_NE(of({1, 3, 4, 1, 5, 9}, 2)[1], first[1]);
  EXPECT_NE(of({3, 1, 4, 1, 5}, 2).back(), first.back());
}

TEST(LookAheadStream, WrongArgumentsAreNamed) {
  Data data{{5, 50}};
  EXPECT_THROW(data.stream({}, {}), std::invalid_argument);
  EXPECT_THROW(data.stream(budget(Cost::sum(), 10), {.samples = 0}), std::invalid_argument);
  EXPECT_THROW(data.stream(budget(Cost::sum(), 10), {.boundaries = {3}}), std::invalid_argument);
  const auto strict = data.stream(budget(Cost::sum(), 10), {.oversize = Oversize::error});
  EXPECT_THROW((void)strict->next(), std::invalid_argument);
  const auto short_data = data.stream(budget(Cost::sum(), 10), {});
  EXPECT_THROW(short_data->seek({{7, 7}, {}}), std::invalid_argument);
}

}  // namespace
}  // namespace brim::batching
