#include <ATen/ops/group_norm.h>
#include <brim/nn/functional.h>

#include "nn/norm_support.h"
#include "tensors.h"

namespace brim::tests {
namespace {

namespace F = nn::functional;

constexpr std::int64_t kChannels = 6;
constexpr double kEps = 1e-4;

Layer torch_layer(std::int64_t groups) {
  return [=](const Tensors& t) {
    return at::group_norm(t[0], groups, option(t[1]), option(t[2]), kEps);
  };
}

Layer brim_layer(std::int64_t groups) {
  return [=](const Tensors& t) {
    return F::group_norm(t[0], groups, option(t[1]), option(t[2]), kEps);
  };
}

Tensors values(at::IntArrayRef sizes, at::ScalarType type, at::ScalarType weights) {
  return {normal(sizes, type), normal({kChannels}, weights), normal({kChannels}, weights)};
}

TEST(GroupNorm, EqualsTorchForEveryMixOfFrozenTensors) {
  const std::vector<std::vector<std::int64_t>> inputs{
      {4, kChannels}, {3, kChannels, 5}, {2, kChannels, 3, 4}, {2, kChannels, 2, 3, 2}};
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const at::ScalarType weights : {type, at::kFloat}) {
      if (type == at::kDouble && weights != type) {
        continue;
      }
      for (const auto& sizes : inputs) {
        for (const std::int64_t groups : {1, 2, 6}) {
          for (unsigned mask = 0; mask < 8; ++mask) {
            const Tensors tensors = leaves(values(sizes, type, weights), mask);
            const at::Tensor cotangent = normal(sizes, type);
            const double tolerance = mask == 4 ? rounding(weights) : 0;
            expect_same(outcome_of(brim_layer(groups), tensors, cotangent),
                        outcome_of(torch_layer(groups), tensors, cotangent), 0, tolerance,
                        c10::str(type, " ", weights, " ", sizes, " ", groups, " mask ", mask));
          }
        }
      }
    }
  }
}

TEST(GroupNorm, EqualsTorchInChannelsLast) {
  for (unsigned mask = 1; mask < 8; ++mask) {
    Tensors start = values({2, kChannels, 3, 4}, at::kFloat, at::kFloat);
    const Tensors plain = leaves(start, mask);
    start[0] = start[0].contiguous(at::MemoryFormat::ChannelsLast);
    const Tensors tensors = leaves(start, mask);
    const at::Tensor cotangent = normal({2, kChannels, 3, 4});
    const Outcome got = outcome_of(brim_layer(2), tensors, cotangent);
    // torch's own backward crashes here where the input needs no gradient.
    const bool has_reference = (mask & 1U) != 0;
    expect_same(got, outcome_of(torch_layer(2), has_reference ? tensors : plain, cotangent),
                has_reference ? 0 : 1e-5, has_reference ? 0 : 1e-5, c10::str("mask ", mask));
  }
}

TEST(GroupNorm, WorksWithoutWeights) {
  const Tensors tensors = leaves({normal({3, kChannels, 5}), {}, {}}, 1);
  const at::Tensor cotangent = normal({3, kChannels, 5});
  expect_same(outcome_of(brim_layer(3), tensors, cotangent),
              outcome_of(torch_layer(3), tensors, cotangent), 0, 0, "");
}

TEST(GroupNorm, KeepsTwoNumbersAGroupBesideItsInput) {
  for (unsigned mask = 1; mask < 8; ++mask) {
    const std::int64_t want = mask == 4 ? 0 : 2 * 32 * 3 * 4;
    EXPECT_EQ(kept_bytes(brim_layer(3),
                         leaves(values({32, kChannels, 8, 8}, at::kFloat, at::kFloat), mask)),
              want)
        << mask;
  }
}

TEST(GroupNorm, GivesItsOutputAgain) {
  Tensors start = values({2, kChannels, 3, 4}, at::kFloat, at::kFloat);
  expect_recomputes(brim_layer(2), leaves(start, 1), false);
  start[0] = start[0].contiguous(at::MemoryFormat::ChannelsLast);
  expect_recomputes(brim_layer(2), leaves(start, 2), false);
}

TEST(GroupNorm, DifferentiatesTwice) {
  for (unsigned mask = 1; mask < 8; ++mask) {
    const Tensors tensors = leaves(values({3, kChannels, 4}, at::kDouble, at::kDouble), mask);
    expect_same_second_grads(brim_layer(2), torch_layer(2), tensors,
                             normal({3, kChannels, 4}, at::kDouble), c10::str("mask ", mask));
  }
}

TEST(GroupNorm, UndefinedGradientGivesNone) {
  const at::Tensor output =
      brim_layer(2)(leaves(values({3, kChannels, 4}, at::kFloat, at::kFloat), 7));
  expect_none_from_none(output);
}

TEST(GroupNorm, RefusesWhatTorchRefuses) {
  const at::Tensor input = normal({4, kChannels});
  EXPECT_THROW(F::group_norm(input, 4), c10::Error);
  EXPECT_CONTAINS(message_of<c10::ValueError>([&] { F::group_norm(input, 0); }), "num_groups");
  EXPECT_CONTAINS(
      message_of<c10::ValueError>([&] { F::group_norm(normal({1, kChannels}), kChannels); }),
      "more than 1 value");
  EXPECT_THROW(F::group_norm(normal({kChannels}), 2), c10::Error);
  EXPECT_THROW(F::group_norm(input, 2, normal({5})), c10::Error);
  EXPECT_THROW(F::group_norm(input, 2, {}, normal({5})), c10::Error);
  EXPECT_THROW(F::group_norm(input.to(at::kInt), 2), c10::Error);
}

}  // namespace
}  // namespace brim::tests
