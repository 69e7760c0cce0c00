#include <ATen/ops/layer_norm.h>
#include <brim/nn/functional.h>

#include "nn/norm_support.h"
#include "tensors.h"

namespace brim::tests {
namespace {

namespace F = nn::functional;

constexpr double kEps = 1e-4;

Layer torch_layer(std::vector<std::int64_t> shape) {
  return [shape = std::move(shape)](const Tensors& t) {
    return at::layer_norm(t[0], shape, option(t[1]), option(t[2]), kEps);
  };
}

Layer brim_layer(std::vector<std::int64_t> shape) {
  return [shape = std::move(shape)](const Tensors& t) {
    return F::layer_norm(t[0], shape, option(t[1]), option(t[2]), kEps);
  };
}

TEST(LayerNorm, EqualsTorchForEveryMixOfFrozenTensors) {
  const std::vector<std::vector<std::int64_t>> inputs{{7}, {4, 7}, {3, 4, 7}, {2, 3, 4, 7}};
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const at::ScalarType weights : {type, at::kFloat}) {
      if (type == at::kDouble && weights != type) {
        continue;
      }
      for (const auto& sizes : inputs) {
        for (std::size_t dims = 1; dims <= std::min<std::size_t>(2, sizes.size()); ++dims) {
          const std::vector<std::int64_t> shape(sizes.end() - static_cast<std::ptrdiff_t>(dims),
                                                sizes.end());
          for (unsigned mask = 0; mask < 8; ++mask) {
            const Tensors tensors =
                leaves({normal(sizes, type), normal(shape, weights), normal(shape, weights)}, mask);
            const at::Tensor cotangent = normal(sizes, type);
            // Without the input the bias' gradient is a plain sum; torch adds in the half type.
            const double tolerance = mask == 4 ? rounding(type) : 0;
            expect_same(outcome_of(brim_layer(shape), tensors, cotangent),
                        outcome_of(torch_layer(shape), tensors, cotangent), 0, tolerance,
                        c10::str(type, " ", weights, " ", sizes, " ", dims, " mask ", mask));
          }
        }
      }
    }
  }
}

TEST(LayerNorm, WorksWithoutWeightsAndOnOtherStrides) {
  const Tensors plain = leaves({normal({4, 7}), {}, {}}, 1);
  const at::Tensor cotangent = normal({4, 7});
  expect_same(outcome_of(brim_layer({7}), plain, cotangent),
              outcome_of(torch_layer({7}), plain, cotangent), 0, 0, "no weights");
  const Tensors turned = leaves({normal({7, 4}).t(), normal({7}), {}}, 3);
  expect_same(outcome_of(brim_layer({7}), turned, cotangent),
              outcome_of(torch_layer({7}), turned, cotangent), 0, 0, "transposed");
}

TEST(LayerNorm, KeepsTwoNumbersARowBesideItsInput) {
  const Tensors values{normal({64, 512}), normal({512}), normal({512})};
  for (unsigned mask = 1; mask < 8; ++mask) {
    const std::int64_t want = mask == 4 ? 0 : 2 * 64 * 4;
    EXPECT_EQ(kept_bytes(brim_layer({512}), leaves(values, mask)), want) << mask;
  }
}

TEST(LayerNorm, OnlyTheBiasTrainsWithoutTheInput) {
  const at::Tensor bias = normal({512}).set_requires_grad(true);
  const at::Tensor data = normal({64, 512});
  const PeakMeter meter(at::kCPU);
  const at::Tensor output = F::layer_norm(data.add(1), {512}, normal({512}), bias);
  EXPECT_LE(meter.left(), static_cast<std::int64_t>(output.storage().nbytes()));
}

TEST(LayerNorm, GivesItsOutputAgain) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    expect_recomputes(brim_layer({7}),
                      leaves({normal({4, 7}, type), normal({7}, type), normal({7}, type)}, 1),
                      true);
  }
}

TEST(LayerNorm, DifferentiatesTwice) {
  for (unsigned mask = 1; mask < 8; ++mask) {
    const Tensors tensors = leaves(
        {normal({3, 5}, at::kDouble), normal({5}, at::kDouble), normal({5}, at::kDouble)}, mask);
    expect_same_second_grads(brim_layer({5}), torch_layer({5}), tensors,
                             normal({3, 5}, at::kDouble), c10::str("mask ", mask));
  }
}

TEST(LayerNorm, UndefinedGradientGivesNone) {
  const at::Tensor output = brim_layer({7})(leaves({normal({4, 7}), normal({7}), normal({7})}, 7));
  expect_none_from_none(output);
}

TEST(LayerNorm, RefusesOtherShapesAndTypes) {
  EXPECT_THROW(F::layer_norm(normal({4, 7}), {6}), c10::Error);
  EXPECT_THROW(F::layer_norm(normal({4, 7}), {7}, normal({6})), c10::Error);
  EXPECT_THROW(F::layer_norm(normal({4, 7}).to(at::kLong), {7}), c10::Error);
}

}  // namespace
}  // namespace brim::tests
