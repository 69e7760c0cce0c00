#include <brim/memory/block_watch.h>
#include <brim/memory/cpu.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

#include "tensors.h"

namespace brim {
namespace {

using tests::tensor_of;

TEST(BlockWatch, ListsWhatWasMadeSinceAndIsInUseOldestFirst) {
  const at::Tensor before = tensor_of(9000);
  BlockWatch watch(at::kCPU, 1000);
  EXPECT_EQ(watch.least(), 1000);
  const at::Tensor first = tensor_of(1000);
  const at::Tensor too_small = tensor_of(999);
  tensor_of(5000);
  const at::Tensor second = tensor_of(2000);
  const auto blocks = watch.blocks();
  ASSERT_EQ(blocks.size(), 2U);
  EXPECT_EQ(blocks[0].address, reinterpret_cast<std::uintptr_t>(first.data_ptr()));
  EXPECT_EQ(blocks[0].bytes, 1000);
  EXPECT_EQ(blocks[0].made_at, 0);
  EXPECT_EQ(blocks[1].bytes, 2000);
  EXPECT_EQ(blocks[1].made_at, 6000);
  EXPECT_EQ(watch.clock(), 8000);
  EXPECT_EQ(watch.in_use(), tests::held());
  watch.close();
  EXPECT_TRUE(watch.blocks().empty());
  EXPECT_EQ(watch.clock(), 0);
}

TEST(BlockWatch, NestedWatchesShareWhatTheyNoteUntilTheLastOneEnds) {
  BlockWatch outer(at::kCPU, 1000);
  const at::Tensor first = tensor_of(1000);
  {
    const BlockWatch inner(at::kCPU, 1);
    const at::Tensor small = tensor_of(10);
    EXPECT_EQ(inner.blocks().size(), 1U) << "the outer one decides what is worth it";
  }
  EXPECT_EQ(outer.blocks().size(), 1U);
  outer.close();
  EXPECT_TRUE(BlockWatch(at::kCPU, 1000).blocks().empty()) << "what was made before it";
}

TEST(BlockWatch, ChoosesWhatIsLargeEnoughUnlessItIsTold) {
  const std::int64_t least = BlockWatch(at::kCPU).least();
  EXPECT_GE(least, 4 << 10);
  EXPECT_LE(least, 1 << 20);
  EXPECT_CONTAINS(tests::message_of<c10::ValueError>([] { BlockWatch(at::kCPU, -1); }), "-1");
}

TEST(BlockWatch, PlacesHaveOneNumberPerTextAndOthersHaveNoText) {
  const std::int32_t one = place_number("BlockWatch: one");
  const std::int32_t other = place_number("BlockWatch: other");
  EXPECT_NE(one, other);
  EXPECT_EQ(place_number("BlockWatch: one"), one);
  EXPECT_EQ(place_text(one), "BlockWatch: one");
  EXPECT_EQ(place_text(other), "BlockWatch: other");
  EXPECT_EQ(place_text(other + 1), "") << "the newest is the last";
  EXPECT_EQ(place_text(-1), "");
  EXPECT_EQ(place_text(std::numeric_limits<std::int32_t>::min()), "");
}

TEST(BlockWatch, ThePlaceIsThatOfTheFinder) {
  static const std::int32_t here = place_number("BlockWatch: the finder's");
  set_place_finder([]() noexcept { return here; });
  const BlockWatch watch(at::kCPU, 1000);
  const at::Tensor tensor = tensor_of(1000);
  set_place_finder(nullptr);
  const at::Tensor elsewhere = tensor_of(1000);
  ASSERT_EQ(watch.blocks().size(), 2U);
  EXPECT_EQ(watch.blocks()[0].place, here);
  EXPECT_EQ(watch.blocks()[1].place, -1);
}

}  // namespace
}  // namespace brim
