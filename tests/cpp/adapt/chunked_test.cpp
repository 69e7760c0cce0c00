#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>
#include <brim/adapt/adapt.h>
#include <brim/adapt/collect.h>
#include <brim/adapt/size_memory.h>
#include <gtest/gtest.h>

#include <numeric>
#include <utility>
#include <vector>

#include "adapt/calls.h"
#include "need/memory_simulation.h"

namespace brim {
namespace {

using namespace tests;

TEST(Chunked, ChunksAreViewsOfTheTensor) {
  const at::Tensor tensor = at::zeros({10, 3});
  std::int64_t at = 0;
  chunked(tensor, 4, [&](const at::Tensor& chunk, std::int64_t begin, std::int64_t end) {
    EXPECT_EQ(begin, at);
    EXPECT_EQ(chunk.size(0), end - begin);
    EXPECT_EQ(chunk.size(1), 3);
    chunk.add_(begin + 1);
    at = end;
  });
  EXPECT_EQ(at, 10);
  EXPECT_TRUE(tensor.gt(0).all().item<bool>());
}

TEST(Chunked, CutsAnyDimensionFromEitherEnd) {
  for (const std::int64_t dim : {-3, -2, -1, 0, 1, 2}) {
    const at::Tensor tensor = at::zeros({5, 6, 7});
    std::int64_t covered = 0;
    chunked(
        tensor, 2,
        [&](const at::Tensor& chunk, std::int64_t begin, std::int64_t end) {
          EXPECT_EQ(chunk.size(dim), end - begin);
          EXPECT_LE(end - begin, 2);
          EXPECT_EQ(chunk.numel() / chunk.size(dim), tensor.numel() / tensor.size(dim));
          chunk.add_(1);
          covered += end - begin;
        },
        dim);
    EXPECT_EQ(covered, tensor.size(dim));
    EXPECT_TRUE(tensor.eq(1).all().item<bool>()) << "each element once, along " << dim;
  }
}

TEST(Chunked, CollectsTheResultsOfThePartsThatFitted) {
  const at::Tensor tensor = at::arange(100);
  bool failed = false;
  std::vector<std::int64_t> lengths;
  const auto twice = [&](const at::Tensor& chunk, std::int64_t begin, std::int64_t end) {
    if (begin > 40 && !std::exchange(failed, true)) {
      throw c10::OutOfMemoryError("CPU out of memory. Tried to allocate 1.00 GiB");
    }
    lengths.push_back(end - begin);
    return chunk.mul(2);
  };
  const std::vector<at::Tensor> parts = collect_chunked(tensor, 16, twice);
  EXPECT_TRUE(failed);
  EXPECT_TRUE(at::cat(parts).equal(tensor.mul(2)));
  ASSERT_EQ(parts.size(), lengths.size());

  const auto length = [](std::int64_t begin, std::int64_t end) { return end - begin; };
  const std::vector<std::int64_t> sizes = collect_range(0, 100, 16, length);
  EXPECT_EQ(std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0}), 100);
}

TEST(Chunked, AnEmptyDimensionHasNoChunks) {
  const auto never = [](const at::Tensor&, std::int64_t, std::int64_t) { FAIL() << "called"; };
  chunked(at::empty({0}), 4, never);
  chunked(at::empty({3, 0}), 4, never, 1);
  int calls = 0;
  chunked(at::empty({3, 0}), 4, [&](const at::Tensor& chunk, std::int64_t, std::int64_t) {
    EXPECT_EQ(chunk.numel(), 0);
    ++calls;
  });
  EXPECT_GE(calls, 1) << "three rows without columns are three rows";
}

TEST(Chunked, EveryElementIsDoneOnceWhateverFails) {
  simulation::Random random(21);
  SizeMemory memory(8);
  for (int i = 0; i < 1500 && !::testing::Test::HasFailure(); ++i) {
    const std::int64_t dim = random.integer(-2, 1);
    const at::Tensor tensor = at::zeros({random.integer(1, 60), random.integer(1, 60)});
    AdaptOptions options{.strategy = static_cast<Strategy>(random.integer(0, 2))};
    if (random.coin()) {
      options.memory = &memory;
      options.key = static_cast<std::uint64_t>(random.integer(0, 10));
    }
    const double bad_luck = random.real(0, 0.6);
    const std::int64_t most = random.integer(1, 60);
    chunked(
        tensor, random.integer(1, 80),
        [&](const at::Tensor& chunk, std::int64_t begin, std::int64_t end) {
          const std::int64_t size = end - begin;
          if (size > 1 && (size > most || random.real(0, 1) < bad_luck)) {
            throw_out_of_memory();
          }
          chunk.add_(1);
        },
        dim, options);
    ASSERT_TRUE(tensor.eq(1).all().item<bool>()) << "case " << i;
  }
}

TEST(Chunked, AffineNeedReachesNearlyTheMaximumWithoutAnyFailure) {
  constexpr std::int64_t kColumns = 256;
  const at::Tensor tensor = at::empty({20000, kColumns}, at::kByte);
  const Budget budget = room_for(4 * kMiB);
  std::vector<Attempt> attempts;
  chunked(tensor, 20000,
          [&](const at::Tensor& chunk, std::int64_t, std::int64_t) {
            const at::Tensor constant = tensor_of(kMiB);
            const at::Tensor wide = chunk.to(at::kFloat);
          },
          0, {.attempts = &attempts});
  EXPECT_EQ(failures_of(attempts), 0);
  const std::int64_t most = 3 * kMiB / (4 * kColumns);
  EXPECT_GE(attempts[attempts.size() - 2].values.front(), most * 95 / 100)
      << ::testing::PrintToString(sizes_of(attempts));
}

TEST(Chunked, ResultDoesNotDependOnHowManyTriesItTook) {
  const at::Tensor out = at::zeros({40, 3});
  expect_same_result_wherever_it_fails([&] {
    out.zero_();
    chunked(out, 16,
            [&](const at::Tensor& chunk, std::int64_t, std::int64_t) {
              // Row by row, so that how the tensor is cut does not matter.
              for (std::int64_t row = 0; row < chunk.size(0); ++row) {
                chunk.select(0, row).copy_(at::dropout(at::rand({3}), 0.5, true));
              }
            },
            0, {.strategy = Strategy::halving});
    return out;
  });
}

TEST(Chunked, WrongArgumentsAreNamed) {
  const auto nothing = [](const at::Tensor&, std::int64_t, std::int64_t) {};
  const at::Tensor tensor = at::zeros({4, 5});
  EXPECT_CONTAINS(message_of<c10::ValueError>([&] { chunked(tensor, 2, nothing, 2); }),
                  "dim must be from -2 to 1 for a tensor of 2 dimension(s), got 2");
  EXPECT_CONTAINS(message_of<c10::ValueError>([&] { chunked(tensor, 2, nothing, -3); }),
                  "dim must be from -2 to 1 for a tensor of 2 dimension(s), got -3");
  EXPECT_CONTAINS(message_of<c10::ValueError>([&] { chunked(at::zeros({}), 2, nothing); }),
                  "tensor has no dimension to cut");
  EXPECT_CONTAINS(message_of<c10::ValueError>([&] { chunked(tensor, 0, nothing); }),
                  "initial must be 1 or more, got 0");
}

}  // namespace
}  // namespace brim
