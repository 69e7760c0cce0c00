#include <brim/batching/batching.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <vector>

#include "batching/packed_source.h"
#include "batching/reference.h"

namespace brim::batching {
namespace {

using namespace reference;

PackOptions windows_of(std::optional<std::int64_t> window) {
  PackOptions options;
  options.window = window;
  return options;
}

Limit tokens(std::int64_t maximum) { return {Cost::sum(), maximum}; }

/// The number of batches that first fit needs, sample after sample as they come.
std::size_t first_fit(const Ints& sizes, std::int64_t maximum) {
  Ints totals;
  for (const std::int64_t size : sizes) {
    const auto room = std::find_if(totals.begin(), totals.end(),
                                   [&](std::int64_t total) { return total + size <= maximum; });
    if (room == totals.end()) {
      totals.push_back(size);
    } else {
      *room += size;
    }
  }
  return totals.size();
}

template <class T>
void expect_packed(const Columns<T>& columns, const PackOptions& options, bool shuffle) {
  const auto batching = packed_batching(columns, {.indices = {}, .shuffle = shuffle}, options);
  Lists lists = read(*batching, 3);
  for (const Ints& batch : lists) {
    ASSERT_FALSE(batch.empty());
    ASSERT_TRUE(within(columns, batch));
  }
  lists.push_back(indices_of(batching->left_out()));
  ASSERT_EQ(sorted_indices(lists), numbers_below(std::ssize(columns[0].sizes)));
}

TEST(PackedBatching, HasEachSampleOnceAndNoBatchOverAnyBudget) {
  Random random(1);
  for (int trial = 0; trial < 300; ++trial) {
    const std::int64_t samples = any_int(random, 0, 700);
    const std::int64_t most = any_int(random, 0, 60);
    const Ints ints = random_ints(random, samples, 0, most);
    const Ints others = random_ints(random, samples, 0, 90);
    const Doubles doubles = random_quarters(random, samples, 0, most);
    const std::int64_t maximum = any_int(random, std::max<std::int64_t>(1, most - 3), 400);
    const PackOptions options = trial % 7 == 0
                                    ? windows_of(std::nullopt)
                                    : windows_of(trial % 5 == 0 ? 1 : any_int(random, 2, 300));
    for (const Cost& cost : {Cost::sum(), Cost::count(), Cost::padded(), Cost::padded_squared()}) {
      SCOPED_TRACE(trial);
      const Limit limit(cost, maximum);
      expect_packed(Columns<std::int64_t>{{ints, limit}}, options, trial % 2 == 0);
      expect_packed(Columns<double>{{doubles, limit}}, options, trial % 2 == 0);
      expect_packed(Columns<std::int64_t>{{ints, limit}, {others, tokens(300)}}, options,
                    trial % 2 == 0);
      ASSERT_FALSE(HasFailure());
    }
  }
}

TEST(PackedBatching, RoundedSumsOfDoublesStayWithinTheBudget) {
  Random random(2);
  std::uniform_real_distribution<double> any(0.0, 0.5);
  Doubles sizes(5000);
  std::generate(sizes.begin(), sizes.end(), [&] { return any(random); });
  for (const double budget : {1.0, 5.0}) {
    const Columns<double> columns{{sizes, Limit(Cost::sum(), budget)}};
    for (const bool shuffle : {false, true}) {
      const auto batching =
          packed_batching(columns, {.indices = {}, .shuffle = shuffle}, windows_of(500));
      for (const Ints& batch : read(*batching, 4)) {
        double sum = 0.0;
        for (const std::int64_t sample : batch) {
          sum += sizes[static_cast<std::size_t>(sample)];
        }
        EXPECT_LE(sum, budget);
      }
    }
  }
}

Ints proteins(Random& random, std::size_t count) {
  std::lognormal_distribution<double> length(std::log(300.0), 0.6);
  Ints sizes(count);
  std::generate(sizes.begin(), sizes.end(), [&] {
    return static_cast<std::int64_t>(std::clamp(length(random), 30.0, 2000.0));
  });
  return sizes;
}

/// The share of pairs in a batch of `first` that are in a batch of `second` too.
double meet_again(const Lists& first, const Lists& second, std::size_t samples) {
  std::vector<std::size_t> batch_of(samples);
  for (std::size_t b = 0; b < second.size(); ++b) {
    for (const std::int64_t sample : second[b]) {
      batch_of[static_cast<std::size_t>(sample)] = b;
    }
  }
  double pairs = 0;
  double again = 0;
  for (const Ints& batch : first) {
    std::map<std::size_t, double> together;
    for (const std::int64_t sample : batch) {
      again += together[batch_of[static_cast<std::size_t>(sample)]]++;
    }
    pairs += static_cast<double>(batch.size() * (batch.size() - 1)) / 2;
  }
  return again / pairs;
}

TEST(PackedBatching, SamplesOfAShuffledSumMeetByChance) {
  Random random(9);
  for (const std::size_t samples : {500, 4000, 14'000}) {
    const Ints sizes = proteins(random, samples);
    const Columns<std::int64_t> columns{{sizes, tokens(16'384)}};
    const Columns<std::int64_t> two{{sizes, tokens(16'384)},
                                    {sizes, Limit(Cost::count(), std::int64_t{80})}};
    for (const auto& some : {columns, two}) {
      const auto batching = packed_batching(some, {.indices = {}, .shuffle = true});
      const Lists first = read(*batching, 1);
      EXPECT_LE(meet_again(first, read(*batching, 2), samples),
                2.0 / static_cast<double>(first.size()));
      EXPECT_EQ(first, read(*batching, 1));
      // As few batches as best fit of all needs, to one in five hundred.
      const auto tightest = static_cast<double>(read(*packed_batching(some)).size());
      EXPECT_LE(static_cast<double>(first.size()), 1.002 * tightest + 1);
    }
  }
}

TEST(PackedBatching, FewSamplesToABatchAreStillPackedTightly) {
  Random random(10);
  for (const std::int64_t largest : {1000, 500, 334}) {
    const Ints sizes = random_ints(random, 5000, 1, largest);
    const Columns<std::int64_t> columns{{sizes, tokens(1000)}};
    const auto batching = packed_batching(columns, {.indices = {}, .shuffle = true});
    const Lists first = read(*batching, 1);
    const auto tightest = static_cast<double>(read(*packed_batching(columns)).size());
    EXPECT_LE(static_cast<double>(first.size()), 1.01 * tightest);
    EXPECT_LE(meet_again(first, read(*batching, 2), sizes.size()), 0.3);
  }
}

double padding_of(const Lists& lists, const Ints& sizes) {
  double padded = 0;
  double sum = 0;
  for (const Ints& batch : lists) {
    std::int64_t longest = 0;
    for (const std::int64_t sample : batch) {
      longest = std::max(longest, sizes[static_cast<std::size_t>(sample)]);
      sum += static_cast<double>(sizes[static_cast<std::size_t>(sample)]);
    }
    padded += static_cast<double>(batch.size()) * static_cast<double>(longest);
  }
  return 1 - sum / padded;
}

TEST(PackedBatching, ShuffledPaddedSamplesChangePartnersForALittlePadding) {
  Random random(11);
  const Ints sizes = random_ints(random, 5000, 1'000, 1'000'000);
  const std::int64_t budget = 20'000'000;
  const Columns<std::int64_t> one{{sizes, Limit(Cost::padded(), budget)}};
  const Columns<std::int64_t> two{{sizes, Limit(Cost::padded(), budget)},
                                  {sizes, Limit(Cost::count(), std::int64_t{100})}};
  for (const auto& columns : {one, two}) {
    const auto batching = packed_batching(columns, {.indices = {}, .shuffle = true});
    const Lists first = read(*batching, 1);
    EXPECT_LE(meet_again(first, read(*batching, 2), sizes.size()), 0.75);
    EXPECT_LE(padding_of(first, sizes), 1.3 * padding_of(read(*packed_batching(columns)), sizes));
  }
}

TEST(PackedBatching, PaddedAndCountPadAsLittleAsSortedSamples) {
  Random random(12);
  const Ints sizes = proteins(random, 9000);
  const Columns<std::int64_t> columns{{sizes, Limit(Cost::padded(), std::int64_t{16'384})},
                                      {sizes, Limit(Cost::count(), std::int64_t{64})}};
  Ints order = numbers_below(9000);
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
    return sizes[static_cast<std::size_t>(a)] > sizes[static_cast<std::size_t>(b)];
  });
  Lists sorted;
  for (const std::int64_t sample : order) {
    if (sorted.empty() || std::ssize(sorted.back()) == 64 ||
        (std::ssize(sorted.back()) + 1) * sizes[static_cast<std::size_t>(sorted.back()[0])] >
            16'384) {
      sorted.emplace_back();
    }
    sorted.back().push_back(sample);
  }
  EXPECT_EQ(read(*packed_batching(columns)), sorted);
}

template <class Stored>
void expect_the_same_as_wide(std::int64_t largest) {
  Random random(13);
  const Ints wide = random_ints(random, 3000, 0, largest);
  const std::vector<Stored> narrow(wide.begin(), wide.end());
  const std::int64_t budget = 5 * largest;
  for (const Cost& cost : {Cost::sum(), Cost::padded()}) {
    const Columns<std::int64_t> of_wide{{wide, Limit(cost, budget)}};
    const Columns<std::int64_t> of_narrow{{narrow, Limit(cost, budget)}};
    for (const bool shuffle : {false, true}) {
      const Order order{.indices = {}, .shuffle = shuffle};
      EXPECT_EQ(read(*packed_batching(of_narrow, order), 3),
                read(*packed_batching(of_wide, order), 3));
      EXPECT_EQ(read(*ordered_batching(of_narrow, order), 3),
                read(*ordered_batching(of_wide, order), 3));
      const double last = std::numeric_limits<double>::infinity();
      const BucketOptions buckets{
          .boundaries = {0.0, 20.0, 60.5, last}, .batch_sizes = {}, .shuffle = shuffle};
      EXPECT_EQ(read(*bucket_batching(SizeSpan<std::int64_t>(narrow), of_narrow, buckets), 3),
                read(*bucket_batching(SizeSpan<std::int64_t>(wide), of_wide, buckets), 3));
    }
  }
}

TEST(SizeSpan, NarrowNumbersAreReadWhereTheyAre) {
  expect_the_same_as_wide<std::int8_t>(127);
  expect_the_same_as_wide<std::uint8_t>(255);
  expect_the_same_as_wide<std::int16_t>(32'767);
  expect_the_same_as_wide<std::uint16_t>(65'535);
  expect_the_same_as_wide<std::int32_t>(2'147'483'647);
  expect_the_same_as_wide<std::uint32_t>(4'294'967'295);
}

TEST(SizeSpan, WrongNarrowNumberIsAnErrorThatNamesIt) {
  const std::vector<std::int16_t> ints{3, 2, -7};
  expect_message([&] { check_sizes(Columns<std::int64_t>{{ints, tokens(9)}}); },
                 {"not negative", "got -7", "index 2"});
  const std::vector<float> floats{0.5F, std::nanf("")};
  expect_message([&] { check_sizes(Columns<double>{{floats, tokens(9)}}); }, {"nan", "index 1"});
}

TEST(PackedBatching, NeedsNoMoreBatchesThanFirstFit) {
  Random random(3);
  for (int trial = 0; trial < 40; ++trial) {
    const Ints sizes = random_ints(random, 3000, 1, any_int(random, 50, 900));
    const Columns<std::int64_t> columns{{sizes, tokens(1000)}};
    const std::size_t whole = read(*packed_batching(columns, {}, windows_of(std::nullopt))).size();
    EXPECT_LE(whole, first_fit(sizes, 1000));
    // And no fewer than the samples need.
    const std::int64_t sum = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
    EXPECT_GE(static_cast<std::int64_t>(whole), (sum + 999) / 1000);
  }
}

TEST(PackedBatching, WindowsOfProteinsAreFullButTheLastBatch) {
  Random random(4);
  const Ints sizes = proteins(random, 40'000);
  const auto batching = packed_batching(Columns<std::int64_t>{{sizes, tokens(16'384)}});
  const Lists lists = read(*batching);
  const double sum =
      static_cast<double>(std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0}));
  EXPECT_GE(sum / (16'384.0 * static_cast<double>(lists.size() - 1)), 0.997);
}

TEST(PackedBatching, PaddedBatchesHoldNeighboursInSize) {
  Random random(5);
  const Ints sizes = random_ints(random, 1000, 1, 500);
  const Columns<std::int64_t> columns{{sizes, Limit(Cost::padded(), std::int64_t{4000})}};
  // Longest first, each batch as long as it fits: the greedy of sorted samples.
  Ints sorted = sizes;
  std::sort(sorted.rbegin(), sorted.rend());
  std::size_t expected = 0;
  for (std::size_t begin = 0; begin < sorted.size(); ++expected) {
    begin += static_cast<std::size_t>(4000 / sorted[begin]);
  }
  const Lists lists = read(*packed_batching(columns, {}, windows_of(std::nullopt)));
  EXPECT_EQ(lists.size(), expected);
  std::int64_t shortest_before = 501;
  for (const Ints& batch : lists) {
    std::int64_t shortest = 501;
    for (const std::int64_t sample : batch) {
      const std::int64_t size = sizes[static_cast<std::size_t>(sample)];
      EXPECT_LE(size, shortest_before);
      shortest = std::min(shortest, size);
    }
    shortest_before = shortest;
  }
}

/// Blocks as the source gives them: one a window.
std::vector<Lists> blocks_of(const Batching& batching) {
  std::vector<Lists> blocks;
  const auto source = batching.epoch(3);
  for (bool more = true; more;) {
    Batches block;
    more = source->fill(block, 1);
    blocks.push_back(lists_of(block));
  }
  return blocks;
}

TEST(PackedBatching, WindowHoldsItsOwnSamplesAndOneBatchOfEarlierOnes) {
  Random random(6);
  for (int trial = 0; trial < 100; ++trial) {
    const std::int64_t samples = any_int(random, 100, 2000);
    const std::int64_t window = any_int(random, 40, 200);
    const Ints sizes = random_ints(random, samples, 1, 300);
    const Columns<std::int64_t> columns{{sizes, tokens(1000)}};
    const auto blocks = blocks_of(*packed_batching(columns, {}, windows_of(window)));
    std::int64_t given = 0;
    for (std::size_t block = 0; block < blocks.size(); ++block) {
      const std::int64_t first = static_cast<std::int64_t>(block) * window;
      const bool last = block + 1 == blocks.size();
      std::int64_t carried = 0;
      for (const Ints& batch : blocks[block]) {
        given += std::ssize(batch);
        for (const std::int64_t sample : batch) {
          EXPECT_TRUE(last || sample < first + window) << "of a window to come";
          EXPECT_GE(sample, first - window) << "held back twice";
          carried += sample < first ? sizes[static_cast<std::size_t>(sample)] : 0;
        }
      }
      EXPECT_LE(carried, 1000) << "more than one batch was held back";
      // All of the windows so far was given, but for one batch.
      EXPECT_LT(std::min(samples, first + window) - given, window);
    }
    EXPECT_EQ(given, samples);
    EXPECT_EQ(std::ssize(blocks), std::max<std::int64_t>(1, (samples + (window + 1) / 2) / window));
  }
}

TEST(PackedBatching, BatchMayBeLargerThanAWindow) {
  const Ints sizes(1000, 1);
  for (const std::int64_t window : {1, 7, 50}) {
    const auto batching =
        packed_batching(Columns<std::int64_t>{{sizes, tokens(300)}}, {}, windows_of(window));
    const Lists lists = read(*batching);
    ASSERT_EQ(lists.size(), 4U) << window;
    EXPECT_EQ(sorted_indices(lists), numbers_below(1000));
  }
}

/// Samples of one size, which counts how many sizes it was asked for.
class CountingTable {
 public:
  CountingTable(std::int64_t samples, std::int64_t size, const Limit& limit)
      : samples_(samples), size_(size), columns_{{{}, limit}} {}

  [[nodiscard]] const Columns<std::int64_t>& columns() const { return columns_; }
  [[nodiscard]] static bool shuffled() { return false; }
  [[nodiscard]] static bool has_oversize() { return false; }
  [[nodiscard]] static detail::Permutation permutation(std::uint64_t /*seed*/) { return {}; }
  [[nodiscard]] std::int64_t size() const { return samples_; }
  [[nodiscard]] bool has(std::int64_t sample) const { return sample < samples_; }
  static void look_ahead(std::int64_t /*samples*/) {}
  static void read(const detail::Permutation& /*none*/, std::int64_t first,
                   std::span<std::int64_t> out) {
    std::iota(out.begin(), out.end(), first);
  }
  void gather(std::span<const std::int64_t> samples, Ints& sizes) {
    gathered += std::ssize(samples);
    sizes.assign(samples.size(), size_);
  }

  std::int64_t gathered = 0;

 private:
  std::int64_t samples_;
  std::int64_t size_;
  Columns<std::int64_t> columns_;
};

TEST(PackedBatching, WorkIsLinearWhereBatchesOutgrowTheirWindow) {
  constexpr std::int64_t kSamples = 100'000;
  constexpr std::int64_t kWindow = 10;
  for (const Cost& cost : {Cost::sum(), Cost::padded(), Cost::count(), Cost::padded_squared()}) {
    for (const std::int64_t size : {0, 1}) {
      for (const std::int64_t maximum : {std::int64_t{999}, 30 * kSamples / 100, kLargest}) {
        CountingTable table(kSamples, size, Limit(cost, maximum));
        detail::PackedSource<std::int64_t, CountingTable> source(table, kWindow, 1.0, 0);
        Batches batches;
        while (source.fill(batches, 1)) {
        }
        EXPECT_EQ(sorted_indices(lists_of(batches)), numbers_below(kSamples));
        EXPECT_LE(table.gathered, 6 * kSamples) << maximum;
      }
    }
  }
}

TEST(PackedBatching, SamplesBetweenThoseLeftOutAreTheSameAsAListOfThem) {
  Random random(12);
  for (const std::int64_t percent : {1, 50, 99}) {
    Ints sizes(5000);
    Ints kept;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      sizes[i] = any_int(random, 0, 99) < percent ? 100 : 1;
      if (sizes[i] == 1) {
        kept.push_back(static_cast<std::int64_t>(i));
      }
    }
    const Columns<std::int64_t> columns{{sizes, tokens(50)}};
    for (const bool shuffle : {false, true}) {
      const Order all{.indices = {}, .shuffle = shuffle};
      const Order listed{.indices = std::span<const std::int64_t>(kept), .shuffle = shuffle};
      EXPECT_EQ(read(*ordered_batching(columns, all), 4),
                read(*ordered_batching(columns, listed), 4));
      EXPECT_EQ(read(*packed_batching(columns, all), 4),
                read(*packed_batching(columns, listed), 4));
    }
  }
}

TEST(PackedBatching, WholeSizesArePackedAlikeWhateverTheirType) {
  Random random(11);
  for (int trial = 0; trial < 200; ++trial) {
    const Ints ints = random_ints(random, any_int(random, 0, 400), 0, 50);
    const Doubles doubles(ints.begin(), ints.end());
    const double maximum = static_cast<double>(any_int(random, 100, 900)) / 2;
    const PackOptions options = windows_of(any_int(random, 1, 200));
    for (const Cost& cost : {Cost::sum(), Cost::count(), Cost::padded(), Cost::padded_squared()}) {
      const Limit limit(cost, maximum);
      const Order order{.indices = {}, .shuffle = trial % 2 == 0};
      const auto whole = packed_batching(Columns<std::int64_t>{{ints, limit}}, order, options);
      const auto real = packed_batching(Columns<double>{{doubles, limit}}, order, options);
      ASSERT_EQ(read(*whole, 5), read(*real, 5)) << trial;
    }
  }
}

TEST(PackedBatching, EmptyBatchesOfAWindowAreFilledInTheNext) {
  // 4 of 9 in a window leave one batch of one; carried on, three of them need but one batch.
  const Ints sizes(12, 3);
  const auto batching =
      packed_batching(Columns<std::int64_t>{{sizes, tokens(9)}}, {}, windows_of(4));
  EXPECT_EQ(read(*batching).size(), 4U);
}

TEST(PackedBatching, FollowsAListOfIndicesWithRepeats) {
  Random random(7);
  const Ints sizes = random_ints(random, 50, 1, 30);
  const Ints order = random_ints(random, 800, 0, 49);
  for (const bool shuffle : {false, true}) {
    const auto batching =
        packed_batching(Columns<std::int64_t>{{sizes, tokens(100)}},
                        {.indices = std::span(order), .shuffle = shuffle}, windows_of(90));
    EXPECT_EQ(batching->samples(), 800);
    EXPECT_EQ(sorted_indices(read(*batching)), sorted_indices({order}));
  }
}

TEST(PackedBatching, ShuffleMixesWindowsAndTheirBatches) {
  Random random(8);
  const Ints sizes = random_ints(random, 5000, 1, 300);
  const Columns<std::int64_t> columns{{sizes, tokens(1000)}};
  const auto batching = packed_batching(columns, {.indices = {}, .shuffle = true}, windows_of(500));
  const Lists lists = read(*batching, 1);
  // Unshuffled, batches begin with the longest samples of their window, one after the other.
  std::int64_t descents = 0;
  for (std::size_t b = 1; b < lists.size(); ++b) {
    descents += static_cast<std::int64_t>(sizes[static_cast<std::size_t>(lists[b][0])] <=
                                          sizes[static_cast<std::size_t>(lists[b - 1][0])]);
  }
  EXPECT_LT(descents, std::ssize(lists) * 3 / 4);
  EXPECT_GT(*std::max_element(lists[0].begin(), lists[0].end()), 500) << "not the first window's";
}

TEST(PackedBatching, NoSamplesGiveNoBatches) {
  const Ints none;
  for (const auto& options : {windows_of(std::nullopt), windows_of(5)}) {
    EXPECT_TRUE(
        read(*packed_batching(Columns<std::int64_t>{{none, tokens(1)}}, {}, options)).empty());
  }
}

TEST(PackedBatching, WrongArgumentIsAnErrorThatNamesIt) {
  const Ints sizes{1, 20, 3};
  const Columns<std::int64_t> columns{{sizes, tokens(10)}};
  expect_message([&] { (void)packed_batching(columns, {}, windows_of(0)); },
                 {"window", "positive", "got 0"});
  expect_message([&] { (void)packed_batching(columns, {}, windows_of(-4)); }, {"got -4"});
  PackOptions strict;
  strict.oversize = Oversize::error;
  expect_message([&] { (void)packed_batching(columns, {}, strict); }, {"sample 1", "20"});
}

}  // namespace
}  // namespace brim::batching
