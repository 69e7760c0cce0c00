#include <ATen/ops/zeros.h>
#include <brim/adapt/adapt.h>
#include <brim/adapt/size_memory.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "adapt/calls.h"

namespace brim {
namespace {

using namespace tests;

TEST(CallKey, ShapeTypeDeviceNumbersTextsAndTheirOrderCount) {
  const at::Tensor a = at::zeros({2, 3});
  const at::Tensor b = at::zeros({3, 2});
  const std::set<std::uint64_t> keys{call_key(),
                                     call_key(a),
                                     call_key(b),
                                     call_key(a, b),
                                     call_key(b, a),
                                     call_key(a.to(at::kDouble)),
                                     call_key(a.to(at::kMeta)),
                                     call_key(at::zeros({6})),
                                     call_key(at::Tensor()),
                                     call_key(a, 1),
                                     call_key(a, 2),
                                     call_key(a, "mode"),
                                     call_key(a, "mode of some length"),
                                     call_key(a, "mode of some lengtg"),
                                     call_key(a, std::string(1, '\0')),
                                     call_key(a, "")};
  EXPECT_EQ(keys.size(), 16U);
  EXPECT_EQ(call_key(a, "mode", 3), call_key(at::zeros({2, 3}), std::string("mode"), 3L));
}

TEST(CallKey, TensorsOfAllLengthsAreOfOneKind) {
  const at::Tensor a = at::zeros({2, 3});
  EXPECT_EQ(call_kind(a, "mode", 3), call_kind(at::zeros({5, 1}), "mode", 3));
  const std::set<std::uint64_t> kinds{call_key(a),
                                      call_kind(a),
                                      call_kind(a, a),
                                      call_kind(a, 1),
                                      call_kind(a, "mode"),
                                      call_kind(a.to(at::kDouble)),
                                      call_kind(a.to(at::kMeta)),
                                      call_kind(at::zeros({6})),
                                      call_kind(at::Tensor())};
  EXPECT_EQ(kinds.size(), 9U);
}

TEST(CallKey, IsTheSameInEveryProcess) {
  EXPECT_EQ(call_key(at::zeros({2, 3}), "mode", 7), 4255808546065390512U);
}

TEST(CallKey, AnIgnoredDimensionDoesNotCount) {
  const auto key = [](const at::Tensor& tensor, std::int64_t dim) {
    CallKey made(5);
    made.add(tensor, dim);
    return made.value();
  };
  EXPECT_EQ(key(at::zeros({2, 3}), 0), key(at::zeros({9, 3}), 0));
  EXPECT_NE(key(at::zeros({2, 3}), 0), key(at::zeros({2, 4}), 0));
  EXPECT_NE(key(at::zeros({2, 3}), 0), key(at::zeros({2, 3}), 1));
}

TEST(CallKey, SizesAreRememberedForEachKindOfCall) {
  SizeMemory memory;
  const auto first_size = [&](const at::Tensor& x, std::int64_t most) {
    std::vector<Attempt> attempts;
    batch(64,
          [&](std::int64_t size) {
            if (size > most) {
              throw_out_of_memory();
            }
          },
          {.strategy = Strategy::halving,
           .memory = &memory,
           .key = call_key(x),
           .attempts = &attempts});
    return attempts.front().size();
  };
  EXPECT_EQ(first_size(at::zeros({10}), 8), 64);
  EXPECT_EQ(first_size(at::zeros({10}), 8), 8) << "the same kind of call starts where it fitted";
  EXPECT_EQ(first_size(at::zeros({11}), 8), 64) << "another shape is another kind";
}

TEST(CallKey, ChunkedRemembersByTheTensorWithoutTheLengthThatIsCut) {
  SizeMemory memory;
  const auto sizes = [&](const at::Tensor& tensor) {
    std::vector<Attempt> attempts;
    chunked(tensor, 8,
            [](const at::Tensor& chunk, std::int64_t, std::int64_t) {
              if (chunk.size(0) > 4) {
                throw_out_of_memory();
              }
            },
            0, {.strategy = Strategy::halving, .memory = &memory, .attempts = &attempts});
    return sizes_of(attempts).front();
  };
  EXPECT_EQ(sizes(at::zeros({16, 2})), 8);
  EXPECT_EQ(sizes(at::zeros({24, 2})), 4);
  EXPECT_EQ(sizes(at::zeros({24, 3})), 8);
}

}  // namespace
}  // namespace brim
