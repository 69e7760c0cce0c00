// Torch's text of settings: what it means for the model, and what it refuses.

#include <brim/predict/allocator_settings.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "tensors.h"

namespace brim {
namespace {

using tests::kMiB;

TEST(AllocatorSettings, NothingMeansTorchsDefaults) {
  for (const char* text : {"", " ", ","}) {
    const AllocatorSettings settings = parse_allocator_settings(text);
    EXPECT_FALSE(settings.options.expandable_segments);
    EXPECT_EQ(settings.options.max_split_size, AllocatorOptions::kUnlimited);
    EXPECT_EQ(settings.options.large_segment_size, 20 * kMiB);
    EXPECT_EQ(settings.options.roundup_power2_divisions, 0);
    EXPECT_TRUE(settings.not_modelled.empty());
  }
}

TEST(AllocatorSettings, SetsWhatTheModelFollows) {
  const AllocatorOptions options =
      parse_allocator_settings(
          "expandable_segments:True, max_split_size_mb:128,max_non_split_rounding_mb : 8,"
          "large_segment_size_mb:32,roundup_power2_divisions:4")
          .options;
  EXPECT_TRUE(options.expandable_segments);
  EXPECT_EQ(options.max_split_size, 128 * kMiB);
  EXPECT_EQ(options.max_non_split_rounding, 8 * kMiB);
  EXPECT_EQ(options.large_segment_size, 32 * kMiB);
  EXPECT_EQ(options.roundup_power2_divisions, 4);
  EXPECT_FALSE(parse_allocator_settings("expandable_segments:False").options.expandable_segments);
}

TEST(AllocatorSettings, NamesWhatTheModelDoesNotFollow) {
  const AllocatorSettings settings = parse_allocator_settings(
      "backend:native,pinned_use_background_threads:True,garbage_collection_threshold:0.8,"
      "roundup_power2_divisions:[256:1,512:2,>:8],expandable_segments:True,backend:"
      "cudaMallocAsync");
  EXPECT_EQ(settings.not_modelled,
            (std::vector<std::string>{"garbage_collection_threshold:0.8",
                                      "roundup_power2_divisions:[256:1,512:2,>:8]",
                                      "backend:cudaMallocAsync"}));
  EXPECT_TRUE(settings.options.expandable_segments);
}

TEST(AllocatorSettings, RefusesWhatTorchRefuses) {
  for (const char* text :
       {"expandable_segments", "expandable_segments:yes", "max_split_size_mb:big",
        "max_split_size_mb:20", "max_split_size_mb:-1", "max_split_size_mb:40MB",
        "roundup_power2_divisions:3", "max_split_size_mb:99999999999999999999"}) {
    EXPECT_THROW(parse_allocator_settings(text), std::invalid_argument) << text;
  }
}

}  // namespace
}  // namespace brim
