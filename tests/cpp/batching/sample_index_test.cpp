#include <brim/batching/sample_index.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "batching/reference.h"
#include "batching/stream_cases.h"

namespace brim::batching {
namespace {

using namespace reference;
namespace fs = std::filesystem;

template <class Stored>
std::vector<Stored> random_sizes(Random& random, std::int64_t count, std::int64_t high) {
  std::vector<Stored> sizes(static_cast<std::size_t>(count));
  for (Stored& size : sizes) {
    size = static_cast<Stored>(any_int(random, 0, high));
    if constexpr (std::is_floating_point_v<Stored>) {
      size += static_cast<Stored>(any_int(random, 0, 3)) / 4;
    }
  }
  return sizes;
}

/// Batches, and what is left out, with two bytes per sample and with counts of any length of block.
template <class Stored>
void expect_same_by_counts(Random& random, bool sorted) {
  using T = std::conditional_t<std::is_floating_point_v<Stored>, double, std::int64_t>;
  const std::int64_t samples =
      any_int(random, 0, 3) == 0 ? any_int(random, 0, 130) : any_int(random, 0, 6000);
  const std::int64_t high = any_int(random, 1, 100);
  std::vector<Stored> sizes = random_sizes<Stored>(random, samples, high);
  if (sorted) {
    std::sort(sizes.begin(), sizes.end());
  }
  BucketOptions options;
  for (double at = 0.25 * static_cast<double>(any_int(random, -4, 8));
       options.boundaries.size() < 2 || any_int(random, 0, 6) > 0;
       at += 0.25 * static_cast<double>(any_int(random, 1, 4 * high))) {
    options.boundaries.push_back(at);
  }
  if (any_int(random, 0, 3) == 0) {
    options.boundaries.push_back(std::numeric_limits<double>::infinity());
  }
  options.shuffle = any_int(random, 0, 1) == 0;
  options.oversize = any_int(random, 0, 1) == 0 ? Oversize::leave_out : Oversize::alone;
  Columns<T> columns{{sizes, Limit(Cost::padded(), any_int(random, high / 2 + 1, 20 * high))}};
  const std::vector<Stored> others = random_sizes<Stored>(random, samples, high);
  if (any_int(random, 0, 2) == 0) {  // a second budget, of other sizes
    columns.push_back({others, Limit(Cost::sum(), any_int(random, high - 1, 30 * high))});
  }
  const auto expected = bucket_batching(SizeSpan<T>(sizes), columns, options);
  for (const std::size_t bytes : {0, 1, 7, 100, 1000}) {
    options.index_bytes = bytes;
    const auto batching = bucket_batching(SizeSpan<T>(sizes), columns, options);
    ASSERT_EQ(batching->left_out(), expected->left_out()) << bytes;
    const Ranks ranks{any_int(random, 0, 2), 3};
    ASSERT_EQ(read(*batching, 5, ranks), read(*expected, 5, ranks)) << bytes;
  }
}

TEST(BucketBatching, CountsPerBlockGiveTheSameBatchesAsAnIndexOfAllSamples) {
  Random random(7);
  for (int trial = 0; trial < 30; ++trial) {
    const bool sorted = trial % 5 == 0;  // blocks that lie in one bucket
    expect_same_by_counts<std::uint8_t>(random, sorted);
    expect_same_by_counts<std::int8_t>(random, sorted);
    expect_same_by_counts<std::uint16_t>(random, sorted);
    expect_same_by_counts<std::int32_t>(random, sorted);
    expect_same_by_counts<std::int64_t>(random, sorted);
    expect_same_by_counts<float>(random, sorted);
    expect_same_by_counts<double>(random, sorted);
    ASSERT_FALSE(HasFailure()) << trial;
  }
}

TEST(EpochIndex, CountsAndSkipsAsMakingTheBatchesDoes) {
  Random random(11);
  for (int trial = 0; trial < 150; ++trial) {
    const auto some = random_case(random, trial % 3 == 0 ? 40'000 : 1500);
    SCOPED_TRACE(some->name);
    const std::uint64_t seed = random();
    const std::int64_t world_size = any_int(random, 1, trial % 4 == 0 ? 40 : 5);
    const auto between = static_cast<std::uint64_t>(any_int(random, 1, 3000));
    const EpochIndex index = EpochIndex::make(*some->batching, seed, world_size, between);
    // Of ordered and packed batches one index serves any number of ranks.
    const std::int64_t readers =
        some->batching->ranks_decide_blocks() ? world_size : any_int(random, 1, 40);
    const Ranks ranks{any_int(random, 0, readers - 1), readers};
    const Lists expected = read(*some->batching, seed, ranks);
    const auto count = std::ssize(expected);
    ASSERT_EQ(BatchStream(*some->batching, seed, ranks).count_rest(&index), count);
    ASSERT_EQ(BatchStream(*some->batching, seed, ranks).count_rest(), count);
    if (readers == world_size) {
      ASSERT_EQ(static_cast<std::int64_t>(index.batches_of_rank), count);
    }

    // Counted from any position, and from any number of batches on.
    const std::int64_t before = any_int(random, 0, count);
    const std::int64_t passed = any_int(random, 0, count - before);
    BatchStream stream(*some->batching, seed, ranks);
    ASSERT_EQ(stream.skip(before, &index), before);
    BatchStream plain(*some->batching, seed, ranks);
    for (std::int64_t i = 0; i < before; ++i) {
      ASSERT_TRUE(plain.next());
    }
    const Position position = plain.position();
    // Not known if the step began in a block that was passed.
    if (message([&] { (void)stream.position(); }) == "no error") {
      ASSERT_EQ(stream.position(), position);
    }
    if (before == 0 || before < count) {
      BatchStream resumed(*some->batching, seed, ranks);
      resumed.seek(position);
      ASSERT_EQ(resumed.count_rest(&index), count - before);
      BatchStream further(*some->batching, seed, ranks);
      further.seek(position);
      ASSERT_EQ(further.skip(passed, &index), passed);
      ASSERT_EQ(read(further), Lists(expected.begin() + before + passed, expected.end()));
    }
    ASSERT_EQ(read(stream), Lists(expected.begin() + before, expected.end()));
    BatchStream all(*some->batching, seed, ranks);
    ASSERT_EQ(all.skip(count + 10, &index), count);
    ASSERT_FALSE(all.next());
  }
}

TEST(EpochIndex, OfAnotherEpochIsNotUsed) {
  const Ints sizes = [] {
    Random random(3);
    return random_ints(random, 50'000, 1, 60);
  }();
  const Columns<std::int64_t> columns{{sizes, Limit(Cost::sum(), std::int64_t{600})}};
  const auto batching = packed_batching(columns, {.indices = {}, .shuffle = true}, {.window = 500});
  const EpochIndex of_another = EpochIndex::make(*batching, 1, 4, 100);
  const Lists expected = read(*batching, 2, {1, 3});
  BatchStream stream(*batching, 2, {1, 3});
  ASSERT_EQ(stream.skip(std::ssize(expected) / 2, &of_another), std::ssize(expected) / 2);
  EXPECT_EQ(read(stream), Lists(expected.begin() + std::ssize(expected) / 2, expected.end()));
}

TEST(SizeSummary, IsThatOfOnePass) {
  Random random(5);
  for (const std::int64_t count : {0, 1, 65'535, 65'536, 65'537, 200'000}) {
    const Ints sizes = random_ints(random, count, 0, 1000);
    for (const std::size_t threads : {1, 3}) {
      const SizeSummary<std::int64_t> summary = summarize(SizeSpan<std::int64_t>(sizes), threads);
      EXPECT_EQ(summary.fingerprint, fingerprint(SizeSpan<std::int64_t>(sizes)));
      ASSERT_EQ(std::ssize(summary.largest), (count + 65'535) / 65'536);
      for (std::size_t part = 0; part < summary.largest.size(); ++part) {
        const auto begin = sizes.begin() + static_cast<std::ptrdiff_t>(part * 65'536);
        const auto length = std::min<std::ptrdiff_t>(65'536, sizes.end() - begin);
        EXPECT_EQ(summary.largest[part], *std::max_element(begin, begin + length));
      }
    }
  }
  Doubles wrong(100'000, 1.0);
  wrong[70'000] = std::numeric_limits<double>::quiet_NaN();
  wrong[80'000] = -1;
  expect_message([&] { (void)summarize(SizeSpan<double>(wrong)); }, {"nan", "index 70000"});
}

/// A folder of its own for each test.
class SampleIndexTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() /
              ("brim-index-" + std::to_string(::testing::UnitTest::GetInstance()->random_seed()) +
               ::testing::UnitTest::GetInstance()->current_test_info()->name() +
               std::to_string(std::random_device()()));
    Random random(2);
    sizes_ = random_sizes<std::uint16_t>(random, 70'000, 400);
    sizes_[69'000] = 5000;
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::shared_ptr<SampleIndex> open(const std::string& data = "one") {
    return std::make_shared<SampleIndex>(SizeSpan<std::int64_t>(sizes_),
                                         SampleIndex::Options{folder_, data, 2});
  }

  struct Result {
    Lists batches;
    Ints left_out;
    std::int64_t count;
  };
  Result batches_with(const std::shared_ptr<SampleIndex>& index) {
    BucketOptions options;
    options.boundaries = {0, 50, 130, 390};
    options.index_bytes = 3000;
    options.index = index;
    Columns<std::int64_t> columns{{sizes_, Limit(Cost::padded(), std::int64_t{4000})}};
    if (index) {
      index->describe(columns);
    }
    const auto batching = bucket_batching(SizeSpan<std::int64_t>(sizes_), columns, options);
    Result result{read(*batching, 9, {1, 4}), indices_of(batching->left_out()), 0};
    const auto epoch = index ? index->epoch(*batching, "these", 9, 4) : nullptr;
    result.count = BatchStream(*batching, 9, {1, 4}).count_rest(epoch.get());
    return result;
  }
  void expect_right(const std::shared_ptr<SampleIndex>& index, std::size_t made,
                    std::size_t notes) {
    if (!plain_ || plain_->of != sizes_) {
      plain_ = Plain{batches_with(nullptr), sizes_};
    }
    const Result& plain = plain_->result;
    const Result result = batches_with(index);
    EXPECT_EQ(result.batches, plain.batches);
    EXPECT_EQ(result.left_out, plain.left_out);
    EXPECT_EQ(result.count, plain.count);
    EXPECT_EQ(index->fingerprint(), fingerprint(SizeSpan<std::int64_t>(sizes_)));
    EXPECT_EQ(index->made(), made);
    EXPECT_EQ(index->take_notes().size(), notes);
    EXPECT_TRUE(index->take_notes().empty());
  }
  std::vector<fs::path> files() const {
    return {fs::directory_iterator(folder_), fs::directory_iterator()};
  }

  struct Plain {
    Result result;
    std::vector<std::uint16_t> of;
  };

  fs::path folder_;
  std::optional<Plain> plain_;  // without an index
  std::vector<std::uint16_t> sizes_;
};

TEST_F(SampleIndexTest, IsMadeOnceAndReadThen) {
  expect_right(open(), 3, 0);
  expect_right(open(), 0, 0);
  EXPECT_EQ(files().size(), 3);
}

TEST_F(SampleIndexTest, OfOtherDataIsMadeAgain) {
  expect_right(open(), 3, 0);
  expect_right(open("two"), 3, 3);
  sizes_[0] += 1;  // one of those that are looked at
  expect_right(open("two"), 3, 3);
  expect_right(open("two"), 0, 0);
}

TEST_F(SampleIndexTest, WithoutAStateOfTheDataAllSizesTellThemApart) {
  expect_right(open(""), 2, 0);
  expect_right(open(""), 0, 0);
  sizes_[66'777] += 1;
  expect_right(open(""), 2, 2);
}

TEST_F(SampleIndexTest, DamageIsSeenWhereverItIs) {
  expect_right(open(), 3, 0);
  Random random(4);
  for (const fs::path& file : files()) {
    const auto length = static_cast<std::int64_t>(fs::file_size(file));
    for (const std::int64_t at :
         {std::int64_t{9}, std::int64_t{40}, any_int(random, 64, length - 1)}) {
      std::fstream out(file, std::ios::in | std::ios::out | std::ios::binary);
      out.seekg(at);
      const int before = out.get();
      out.seekp(at);
      out.put(static_cast<char>(before ^ (1 << any_int(random, 0, 7))));
      out.close();
      expect_right(open(), 1, 1);
    }
    for (const std::int64_t shorter : {length - 1, std::int64_t{64}, std::int64_t{0}}) {
      fs::resize_file(file, static_cast<std::uintmax_t>(shorter));
      expect_right(open(), 1, 1);
    }
    fs::resize_file(file, static_cast<std::uintmax_t>(length + 1));
    expect_right(open(), 1, 1);
  }
  expect_right(open(), 0, 0);
}

TEST_F(SampleIndexTest, WorksWhereNothingCanBeWritten) {
  std::ofstream(folder_) << "a file where the folder should be";
  expect_right(open(), 3, 3);
}

TEST_F(SampleIndexTest, MayBeMadeByManyAtOnce) {
  std::vector<std::thread> makers;
  for (int i = 0; i < 6; ++i) {
    makers.emplace_back([&] {
      const auto index = open();
      const Result result = batches_with(index);
      EXPECT_EQ(result.count, std::ssize(result.batches));
      EXPECT_TRUE(index->take_notes().empty());
    });
  }
  // Those that come late may read what others have made.
  for (std::thread& maker : makers) {
    maker.join();
  }
  expect_right(open(), 0, 0);
  EXPECT_EQ(files().size(), 3);  // nothing temporary is left
}

TEST_F(SampleIndexTest, NoSamplesAndOneSample) {
  for (const std::size_t count : {0, 1}) {
    sizes_.assign(count, 7);
    fs::remove_all(folder_);
    expect_right(open(), 2, 0);  // no counts of so few
    expect_right(open(), 0, 0);
  }
}

}  // namespace
}  // namespace brim::batching
