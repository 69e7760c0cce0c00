#include <ATen/core/Reduction.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randint.h>
#include <brim/nn/functional.h>
#include <brim/nn/losses.h>

#include "nn/norm_support.h"
#include "tensors.h"

namespace brim::tests {
namespace {

namespace F = nn::functional;

constexpr std::int64_t kRows = 64;
constexpr std::int64_t kClasses = 500;

at::Tensor classes() { return at::randint(kClasses, {kRows}, at::kLong); }

TEST(CrossEntropy, IsTorchsBitForBit) {
  const at::Tensor target = classes();
  target[3].fill_(-100);
  for (const auto& [name, reduction] :
       {std::pair("none", at::Reduction::None), std::pair("mean", at::Reduction::Mean),
        std::pair("sum", at::Reduction::Sum)}) {
    for (const double smoothing : {0.0, 0.1}) {
      const at::Tensor own = normal({kRows, kClasses}).requires_grad_();
      const at::Tensor other = own.detach().clone().requires_grad_();
      const at::Tensor loss = F::cross_entropy(own, target, {}, -100, name, smoothing);
      const at::Tensor expected =
          at::cross_entropy_loss(other, target, {}, reduction, -100, smoothing);
      EXPECT_TRUE(at::equal(loss, expected)) << name << smoothing;
      loss.backward(at::ones_like(loss));
      expected.backward(at::ones_like(expected));
      EXPECT_TRUE(at::equal(own.grad(), other.grad())) << name << smoothing;
    }
  }
}

/// Bytes kept by the head and the loss for backward.
std::int64_t kept_by_head(bool recompute, const at::Tensor& weight) {
  const at::Tensor x = normal({kRows, 16}).to(at::kBFloat16).requires_grad_();
  const at::Tensor target = classes();
  const Layer loss = [&](const Tensors& t) {
    return F::cross_entropy(F::linear(F::silu(t[0]), t[1], {}, recompute), target, {}, -100, "mean",
                            0.0, true, recompute);
  };
  return kept_bytes(loss, {x, weight});
}

TEST(CrossEntropy, KeepsTheLogitsInTheirOwnTypeOrNothing) {
  constexpr std::int64_t kLogits = kRows * kClasses * 2;
  constexpr std::int64_t kLittle = 16 << 10;  // the input of the linear layer, the target
  const at::Tensor weight = normal({kClasses, 16}).to(at::kBFloat16).requires_grad_();
  EXPECT_NEAR(static_cast<double>(kept_by_head(false, weight)), kLogits, kLittle);
  EXPECT_LT(kept_by_head(true, weight), kLittle);
  EXPECT_LT(kept_by_head(true, weight.detach()), kLittle);
}

TEST(LinearCrossEntropy, IsThePlainFormInParts) {
  const at::Tensor target = classes();
  target[3].fill_(-100);
  const Tensors own = leaves({normal({kRows, 16}), normal({kClasses, 16}), normal({kClasses})}, 7);
  const Tensors other = leaves(own, 7);
  const at::Tensor plain = F::cross_entropy(F::linear(other[0], other[1], other[2]), target);
  plain.backward();
  for (const std::int64_t chunk : {0, 1, 20}) {
    const at::Tensor loss =
        F::linear_cross_entropy(own[0], own[1], target, own[2], {.chunk = chunk});
    EXPECT_TRUE(at::allclose(loss, plain));
    const auto grads = torch::autograd::grad({loss}, own);
    for (std::size_t i = 0; i < own.size(); ++i) {
      EXPECT_TRUE(at::allclose(grads[i], other[i].grad(), 1e-5, 1e-6)) << i << ", chunk " << chunk;
    }
  }
}

TEST(LinearCrossEntropy, KeepsNothingOfTheSizeOfTheLogitsOrTheWeight) {
  const Tensors tensors = leaves({normal({kRows, 16}), normal({kClasses, 16})}, 3);
  const at::Tensor target = classes();
  const Layer loss = [&](const Tensors& t) {
    return F::linear_cross_entropy(t[0], t[1], target, {}, {.chunk = 8});
  };
  EXPECT_LT(kept_bytes(loss, tensors), kRows * 16);
}

TEST(LinearCrossEntropy, RefusesAChunkBelowZero) {
  EXPECT_THROW(F::linear_cross_entropy(normal({2, 4}), normal({3, 4}),
                                       at::randint(3, {2}, at::kLong), {}, {.chunk = -1}),
               c10::ValueError);
}

TEST(CrossEntropy, RefusesAnUnknownReduction) {
  EXPECT_THROW(F::cross_entropy(normal({2, 3}), at::randint(3, {2}, at::kLong), {}, -100, "median"),
               c10::ValueError);
}

}  // namespace
}  // namespace brim::tests
