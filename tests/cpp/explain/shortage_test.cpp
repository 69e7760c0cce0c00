#include <ATen/ops/empty.h>
#include <brim/explain/shortage.h>
#include <brim/memory/budget.h>
#include <brim/memory/bytes.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <random>
#include <string>
#include <vector>

namespace brim {
namespace {

constexpr std::int64_t kMiB = std::int64_t{1} << 20;
constexpr std::int64_t kGiB = std::int64_t{1} << 30;

/// A device of 80 GiB of which this process holds `allocated`, and others so much.
ShortageFacts on_cuda(std::int64_t requested, std::int64_t allocated, std::int64_t others = 0,
                      std::int64_t scattered = 0) {
  const std::int64_t limit = 80 * kGiB;
  return {.error = {.kind = OomKind::device_memory,
                    .device = c10::Device(c10::DeviceType::CUDA, 0),
                    .requested = requested,
                    .in_use = allocated},
          .stats = {.allocated = allocated,
                    .reserved = allocated + scattered,
                    .limit = limit,
                    .free = limit - allocated - others}};
}

TEST(Shortage, WorkThatNeedsMoreThanTheDeviceHasIsARealNeed) {
  const Shortage found = diagnose(on_cuda(10 * kGiB, 79 * kGiB));
  EXPECT_EQ(found.cause, ShortageCause::need);
  EXPECT_EQ(found.missing, 9 * kGiB);
}

TEST(Shortage, OtherProcessesAreTheCauseOnlyIfItFitsWithoutThem) {
  EXPECT_EQ(diagnose(on_cuda(10 * kGiB, 50 * kGiB, 30 * kGiB)).cause,
            ShortageCause::other_processes);
  EXPECT_EQ(diagnose(on_cuda(40 * kGiB, 50 * kGiB, 30 * kGiB)).cause, ShortageCause::need);
}

TEST(Shortage, WhatGrewToMoreThanOtherProcessesHoldComesFirst) {
  ShortageFacts facts = on_cuda(kGiB, 75 * kGiB, 5 * kGiB);
  facts.grown = 74 * kGiB;
  EXPECT_EQ(diagnose(facts).cause, ShortageCause::growth);
  facts.grown = 2 * kGiB;
  EXPECT_EQ(diagnose(facts).cause, ShortageCause::other_processes);
}

TEST(Shortage, ContextOfThisProcessIsNoOtherProcess) {
  const Shortage found = diagnose(on_cuda(kGiB, 79 * kGiB + 512 * kMiB, 512 * kMiB));
  EXPECT_EQ(found.cause, ShortageCause::need);
}

TEST(Shortage, EnoughInPiecesIsFragmentation) {
  const Shortage found = diagnose(on_cuda(2 * kGiB, 70 * kGiB, 0, 10 * kGiB));
  EXPECT_EQ(found.cause, ShortageCause::fragmentation);
  EXPECT_EQ(found.scattered, 10 * kGiB);
}

TEST(Shortage, WorkspaceAndSizeLimitAreNamedByTheError) {
  ShortageFacts facts = on_cuda(0, kGiB);
  facts.error.kind = OomKind::library_workspace;
  EXPECT_EQ(diagnose(facts).cause, ShortageCause::workspace);
  facts.error.kind = OomKind::size_limit;
  EXPECT_EQ(diagnose(facts).cause, ShortageCause::size_limit);
}

TEST(Shortage, GrowthIsTheCauseOnlyIfItIsAsLargeAsWhatIsMissing) {
  ShortageFacts facts = on_cuda(2 * kGiB, 79 * kGiB);
  facts.held = {
      {.kind = MemoryKind::other, .where = "train.py:3", .bytes = kGiB / 2, .grows = true}};
  EXPECT_EQ(diagnose(facts).cause, ShortageCause::need);
  facts.held[0].bytes = 4 * kGiB;
  EXPECT_EQ(diagnose(facts).cause, ShortageCause::growth);
}

std::vector<HeldBlock> made_at(const std::vector<std::int64_t>& times) {
  std::vector<HeldBlock> blocks;
  for (const std::int64_t time : times) {
    blocks.push_back({.bytes = kMiB, .made_at = time, .where = "a.py:1"});
  }
  return blocks;
}

TEST(Holders, BlocksMadeOneAfterTheOtherUntilTheEndGrow) {
  EXPECT_TRUE(holders_of(made_at({10, 20, 30, 40, 50}), 55)[0].grows);
}

TEST(Holders, BlocksMadeInOneGoLongAgoDoNot) {
  EXPECT_FALSE(holders_of(made_at({1, 2, 3, 4, 5}), 1000)[0].grows);
}

TEST(Holders, FewBlocksAndBlocksFromBeforeTheWatchDoNot) {
  EXPECT_FALSE(holders_of(made_at({10, 20, 30}), 35)[0].grows);
  EXPECT_FALSE(holders_of(made_at({-1, -1, -1, -1, -1}), 35)[0].grows);
}

TEST(Holders, BlocksWithAReasonToStayDoNot) {
  std::vector<HeldBlock> blocks = made_at({10, 20, 30, 40, 50});
  std::ranges::for_each(blocks, [](HeldBlock& block) { block.has_reason = true; });
  EXPECT_FALSE(holders_of(blocks, 55)[0].grows);
}

TEST(Holders, SumsAreThoseOfAllBlocksWhateverTheirOrder) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    std::vector<HeldBlock> blocks;
    std::int64_t total = 0;
    for (int i = std::uniform_int_distribution(0, 30)(random); i > 0; --i) {
      const auto bytes = std::uniform_int_distribution<std::int64_t>(0, 1000)(random);
      const int where = std::uniform_int_distribution(0, 3)(random);
      blocks.push_back({.bytes = bytes, .made_at = i, .where = std::to_string(where)});
      total += bytes;
    }
    std::int64_t sum = 0;
    std::int64_t count = 0;
    const std::vector<Holder> holders = holders_of(blocks, 31);
    for (const Holder& holder : holders) {
      sum += holder.bytes;
      count += holder.count;
    }
    EXPECT_EQ(sum, total);
    EXPECT_EQ(count, static_cast<std::int64_t>(blocks.size()));
    EXPECT_TRUE(std::ranges::is_sorted(holders, std::greater<>(), &Holder::bytes));
  }
}

TEST(BlockWatch, TellsWhatIsInUse) {
  const BlockWatch watch(c10::DeviceType::CPU, 1024);
  const at::Tensor small = at::empty({16});
  at::Tensor kept = at::empty({1024});
  {
    const at::Tensor gone = at::empty({4096});
  }
  const std::vector<LiveBlock> blocks = watch.blocks();
  ASSERT_EQ(blocks.size(), 1U);
  EXPECT_EQ(blocks[0].bytes, 4096);
  EXPECT_EQ(blocks[0].address, reinterpret_cast<std::uintptr_t>(kept.data_ptr()));
  kept = at::Tensor();
  EXPECT_TRUE(watch.blocks().empty());
}

TEST(BlockWatch, NestedOnesShareWhatTheyNoteUntilTheLastIsClosed) {
  BlockWatch outer(c10::DeviceType::CPU, 1024);
  const at::Tensor before = at::empty({1024});
  {
    const BlockWatch inner(c10::DeviceType::CPU, 1024);
    EXPECT_EQ(inner.blocks().size(), 1U);
  }
  EXPECT_EQ(outer.blocks().size(), 1U);
  outer.close();
  const BlockWatch fresh(c10::DeviceType::CPU, 1024);
  EXPECT_TRUE(fresh.blocks().empty());
}

TEST(BlockWatch, RefusesWhatIsNoSize) {
  EXPECT_THROW(BlockWatch(c10::DeviceType::CPU, -1), c10::ValueError);
}

TEST(Explain, NamesTheCauseAndTheFigures) {
  const BlockWatch watch(c10::DeviceType::CPU, 1024);
  const Budget budget(ByteLimit::of_bytes(kMiB), c10::DeviceType::CPU);
  const at::Tensor held = at::empty({64 << 10});
  std::string text;
  try {
    const at::Tensor refused = at::empty({1 << 20});
  } catch (...) {
    text = explain(std::current_exception(), c10::DeviceType::CPU, &watch);
  }
  EXPECT_NE(text.find("cause: real need"), std::string::npos) << text;
  EXPECT_NE(text.find("asked for 4.00 MiB with 256.00 KiB in use, of 1.00 MiB"), std::string::npos)
      << text;
  EXPECT_TRUE(text.ends_with("1  256.00 KiB")) << text;
}

TEST(Explain, SaysNothingOfOtherErrors) {
  const auto other = std::make_exception_ptr(std::runtime_error("a wrong shape"));
  EXPECT_EQ(explain(other, c10::DeviceType::CPU), "");
}

TEST(LeftByCalls, IsWhatMostCallsAddAfterTheFirst) {
  using Held = std::vector<std::int64_t>;
  EXPECT_EQ(left_by_calls(Held{0, 100, 110, 120, 130}), 30);
  EXPECT_EQ(left_by_calls(Held{0, 100, 110, 110, 120, 130}), 30);  // one added nothing
  EXPECT_EQ(left_by_calls(Held{0, 100, 100, 100}), 0);             // states of an optimizer
  EXPECT_EQ(left_by_calls(Held{0, 100, 100, 500, 500, 500}), 0);   // something else, once
  EXPECT_EQ(left_by_calls(Held{0, 500, 510, 100, 110}), 0);        // less than before
  EXPECT_EQ(left_by_calls(Held{0, 100, 200}), 0);                  // too few to tell
  EXPECT_EQ(left_by_calls(Held{}), 0);
}

}  // namespace
}  // namespace brim
