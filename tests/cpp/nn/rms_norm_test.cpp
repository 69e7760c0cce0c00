#include <ATen/ops/rms_norm.h>
#include <brim/nn/functional.h>

#include "nn/norm_support.h"
#include "nn/reference.h"
#include "tensors.h"

namespace brim::tests {
namespace {

namespace F = nn::functional;

using Sizes = std::vector<std::int64_t>;
using Eps = std::optional<double>;

Layer torch_layer(const Sizes& shape, Eps eps) {
  return [=](const Tensors& t) { return at::rms_norm(t[0], shape, option(t[1]), eps); };
}

Layer brim_layer(const Sizes& shape, Eps eps) {
  return [=](const Tensors& t) { return F::rms_norm(t[0], shape, option(t[1]), eps); };
}

TEST(RmsNorm, EqualsTorchForEveryMixOfFrozenTensors) {
  const std::vector<Sizes> inputs{{7}, {4, 33}, {3, 4, 16}, {2, 3, 4, 7}};
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const at::ScalarType weights : {type, at::kFloat}) {
      if (type == at::kDouble && weights != type) {
        continue;
      }
      for (const Sizes& sizes : inputs) {
        for (std::size_t dims = 1; dims <= std::min<std::size_t>(2, sizes.size()); ++dims) {
          const Sizes shape(sizes.end() - static_cast<std::ptrdiff_t>(dims), sizes.end());
          for (const Eps eps : {Eps(), Eps(0.1)}) {
            for (unsigned mask = 0; mask < 4; ++mask) {
              const Tensors tensors = leaves({normal(sizes, type), normal(shape, weights)}, mask);
              const at::Tensor cotangent = normal(sizes, type);
              // Values are the same; gradients are summed in another order.
              expect_same(outcome_of(brim_layer(shape, eps), tensors, cotangent),
                          outcome_of(torch_layer(shape, eps), tensors, cotangent), 0,
                          rounding(type),
                          c10::str(type, " ", weights, " ", sizes, " ", dims, " mask ", mask));
            }
          }
        }
      }
    }
  }
}

TEST(RmsNorm, GradientsOfManyRowsAreAsExactAsTorchs) {
  // Against float64: rows for several threads, a size that is no multiple of a block.
  const Tensors start{normal({700, 301}), normal({301})};
  const at::Tensor cotangent = normal({700, 301});
  const Outcome got = outcome_of(brim_layer({301}, 1e-5), leaves(start, 3), cotangent);
  const Outcome exact = outcome_of(torch_layer({301}, 1e-5),
                                   leaves({start[0].to(at::kDouble), start[1].to(at::kDouble)}, 3),
                                   cotangent.to(at::kDouble));
  for (std::size_t i = 0; i < 2; ++i) {
    expect_same(got.grads[i].to(at::kDouble), exact.grads[i], 1e-6, std::to_string(i));
  }
}

TEST(RmsNorm, WorksWithoutWeightAndOnOtherStridesAndSizes) {
  const Layer layer = brim_layer({7}, {});
  const Layer reference = torch_layer({7}, {});
  const at::Tensor cotangent = normal({4, 7});
  const Tensors plain = leaves({normal({4, 7}), {}}, 1);
  expect_same(outcome_of(layer, plain, cotangent), outcome_of(reference, plain, cotangent), 0, 1e-5,
              "no weight");
  const Tensors turned = leaves({normal({7, 4}).t(), normal({7})}, 3);
  expect_same(outcome_of(layer, turned, cotangent), outcome_of(reference, turned, cotangent), 0,
              1e-5, "transposed");
  const Tensors empty = leaves({normal({0, 7}), normal({7})}, 3);
  expect_same(outcome_of(layer, empty, normal({0, 7})),
              outcome_of(reference, empty, normal({0, 7})), 0, 0, "no rows");
}

TEST(RmsNorm, KernelWorksOutOnlyWhatIsAskedFor) {
  using Op =
      std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                         const MaybeTensor&, std::int64_t, bool, bool);
  const auto op = operator_named<Op>("brim::rms_norm_backward");
  const at::Tensor input = normal({5, 3, 20});
  const at::Tensor grad = normal({5, 3, 20});
  const at::Tensor weight = normal({3, 20});
  const at::Tensor rstd = normal({5, 1, 1}).abs();
  const at::Tensor hat = input.mul(rstd);
  const at::Tensor along = grad.mul(weight).mul(hat).mean({1, 2}, true);
  const at::Tensor input_grad = grad.mul(weight).sub(hat.mul(along)).mul(rstd);
  const at::Tensor weight_grad = grad.mul(hat).sum(0);
  for (const bool wants_input : {false, true}) {
    for (const bool wants_weight : {false, true}) {
      const auto got = op.call(grad, input, rstd, weight, 2, wants_input, wants_weight);
      expect_same(std::get<0>(got), wants_input ? input_grad : at::Tensor(), 1e-5, "input");
      expect_same(std::get<1>(got), wants_weight ? weight_grad : at::Tensor(), 1e-5, "weight");
    }
  }
}

TEST(RmsNorm, KeepsOneNumberARowBesideItsInputForTheInputsGradient) {
  for (unsigned mask = 1; mask < 4; ++mask) {
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
      const Tensors tensors = leaves({normal({64, 512}, type), normal({512}, type)}, mask);
      const std::int64_t rows = (mask & 1U) != 0 ? 64 : 0;
      EXPECT_EQ(kept_bytes(brim_layer({512}, {}), tensors), rows * 4) << mask << type;
    }
  }
}

TEST(RmsNorm, GivesItsOutputAgain) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    expect_recomputes(brim_layer({7}, {}), leaves({normal({4, 7}, type), normal({7}, type)}, 1),
                      true);
  }
}

TEST(RmsNorm, DifferentiatesTwice) {
  for (unsigned mask = 1; mask < 4; ++mask) {
    for (const Eps eps : {Eps(), Eps(0.1)}) {
      const Tensors tensors = leaves({normal({3, 5}, at::kDouble), normal({5}, at::kDouble)}, mask);
      expect_same_second_grads(brim_layer({5}, eps), torch_layer({5}, eps), tensors,
                               normal({3, 5}, at::kDouble), c10::str("mask ", mask));
    }
  }
}

TEST(RmsNorm, UndefinedGradientGivesNone) {
  const at::Tensor output = brim_layer({7}, {})(leaves({normal({4, 7}), normal({7})}, 3));
  expect_none_from_none(output);
}

TEST(RmsNorm, RefusesOtherShapesAndTypes) {
  EXPECT_CONTAINS(message_of<c10::Error>([] { F::rms_norm(normal({4, 7}), {6}); }),
                  "normalized_shape");
  EXPECT_THROW(F::rms_norm(normal({4, 7}), {}), c10::Error);
  EXPECT_THROW(F::rms_norm(normal({7}), {4, 7}), c10::Error);
  EXPECT_CONTAINS(message_of<c10::Error>([] { F::rms_norm(normal({4, 7}), {7}, normal({6})); }),
                  "weight");
  EXPECT_THROW(F::rms_norm(normal({4, 7}).to(at::kLong), {7}), c10::Error);
}

}  // namespace
}  // namespace brim::tests
