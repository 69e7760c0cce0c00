#include <brim/batching/sample_stream.h>
#include <gtest/gtest.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "batching/reference.h"

namespace brim::batching {
namespace {

using namespace reference;

using Stream = SampleStream<std::string>;

Stream::Read reader(std::vector<std::string> samples) {
  return [samples = std::move(samples), next = std::size_t{0}]() mutable {
    return next < samples.size() ? std::optional(samples[next++]) : std::nullopt;
  };
}

void length_of(const std::string& sample, std::span<double> sizes) {
  sizes[0] = static_cast<double>(sample.size());
}

using Batch = std::vector<std::string>;

TEST(SampleStream, ClosesABatchWhenTheNextSampleDoesNotFit) {
  Stream stream(reader({"a", "bcd", "ef", "ghij"}), length_of, {{Cost::sum(), 5.0}});
  EXPECT_EQ(stream.samples_read(), 0) << "nothing is read before it is needed";
  EXPECT_EQ(stream.next(), (Batch{"a", "bcd"}));
  EXPECT_EQ(stream.begin(), 2);
  EXPECT_EQ(stream.samples_read(), 3);
  EXPECT_EQ(stream.next(), (Batch{"ef"}));
  EXPECT_EQ(stream.next(), (Batch{"ghij"}));
  EXPECT_EQ(stream.next(), std::nullopt);
  EXPECT_EQ(stream.batched(), 4);
  EXPECT_EQ(stream.batches(), 3);
}

TEST(SampleStream, MakesTheBatchesThatOrderedBatchingMakes) {
  Random random(1);
  for (int trial = 0; trial < 50; ++trial) {
    const Doubles sizes = random_quarters(random, any_int(random, 0, 200), 0, 30);
    const Limit limit(trial % 2 == 0 ? Cost::sum() : Cost::padded(), 25.0);
    std::size_t next = 0;
    SampleStream<std::int64_t> stream(
        [&] {
          return next < sizes.size() ? std::optional(static_cast<std::int64_t>(next++))
                                     : std::nullopt;
        },
        [&](std::int64_t sample, std::span<double> size) {
          size[0] = sizes[static_cast<std::size_t>(sample)];
        },
        {limit});
    Lists found;
    while (auto batch = stream.next()) {
      found.push_back(std::move(*batch));
    }
    const auto batching = ordered_batching(Columns<double>{{sizes, limit}});
    ASSERT_EQ(found, read(*batching));
    ASSERT_EQ(stream.left_out(), indices_of(batching->left_out()));
  }
}

TEST(SampleStream, ResumesAtTheSampleThatABatchBeginsWith) {
  const std::vector<std::string> samples{"aa", "bbbbbbbb", "c", "dd", "eee", "f", "gg"};
  Stream whole(reader(samples), length_of, {{Cost::sum(), 4.0}});
  std::vector<Batch> rest;
  EXPECT_EQ(whole.next(), (Batch{"aa", "c"}));
  const std::int64_t begin = whole.begin();
  while (auto batch = whole.next()) {
    rest.push_back(*batch);
  }
  Stream resumed(reader(samples), length_of, {{Cost::sum(), 4.0}}, Oversize::leave_out, begin);
  for (const Batch& batch : rest) {
    EXPECT_EQ(resumed.next(), batch);
  }
  EXPECT_EQ(resumed.next(), std::nullopt);
  Stream beyond(reader(samples), length_of, {{Cost::sum(), 4.0}}, Oversize::leave_out, 8);
  expect_message([&] { (void)beyond.next(); }, {"sample 8", "only 7"});
}

TEST(SampleStream, OversizeIsAnErrorThatNamesTheSampleAndThenTheEnd) {
  Stream stream(reader({"a", "bbbbbb", "c"}), length_of, {{Cost::sum(), 5.0}}, Oversize::error);
  expect_message([&] { (void)stream.next(); }, {"sample 1 exceeds the budget", "its size is 6"});
  EXPECT_EQ(stream.next(), std::nullopt);
}

}  // namespace
}  // namespace brim::batching
