#include <ATen/Context.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/rand.h>
#include <brim/memory/peak_meter.h>
#include <brim/nn/functional.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <limits>

#include "nn/reference.h"
#include "tensors.h"

namespace brim::nn {
namespace {

using tests::kFloatingTypes;
using tests::message_of;
using tests::normal_numbers;
using tests::same;

constexpr std::uint64_t kSeed = 7;

/// What the next one who asks would draw.
at::Tensor next_random() { return at::rand({4}, at::TensorOptions().dtype(at::kFloat)); }

/// Values, gradients and the random state after, of both from the same seed.
void expect_equal(const at::Tensor& numbers, double p, const std::string& where) {
  const at::Tensor cotangent = at::randn_like(numbers);
  const at::Tensor ours = numbers.detach().requires_grad_();
  const at::Tensor torchs = numbers.detach().requires_grad_();
  at::manual_seed(kSeed);
  const at::Tensor our_value = functional::dropout(ours, p);
  const at::Tensor our_next = next_random();
  at::manual_seed(kSeed);
  const at::Tensor torchs_value = at::dropout(torchs, p, true);
  EXPECT_TRUE(same(our_next, next_random())) << where;
  EXPECT_TRUE(same(our_value, torchs_value)) << where;
  EXPECT_EQ(our_value.strides(), torchs_value.strides()) << where;
  if (our_value.requires_grad()) {
    our_value.backward(cotangent);
    torchs_value.backward(cotangent);
    EXPECT_TRUE(same(ours.grad(), torchs.grad())) << where;
  }
}

TEST(Dropout, TheSameSeedGivesTorchsValuesAndGradients) {
  for (const at::ScalarType type : kFloatingTypes) {
    for (const double p : {0.0, 0.1, 0.3, 0.5, 0.9, 1.0}) {
      for (const std::int64_t n : {1, 7, 64, 1000, 70001}) {
        expect_equal(normal_numbers({n}, type), p,
                     std::string(c10::toString(type)) + ", p " + std::to_string(p) + ", " +
                         std::to_string(n));
      }
    }
  }
}

TEST(Dropout, EveryLayoutGivesTorchsValuesAndGradients) {
  for (const auto& [name, numbers] : tests::layouts(at::kFloat)) {
    expect_equal(numbers, 0.3, name);
  }
}

TEST(Dropout, WithoutGradientsTheSameSeedGivesTorchsValues) {
  const at::Tensor input = normal_numbers({1000}, at::kFloat);
  at::manual_seed(kSeed);
  const at::Tensor ours = functional::dropout(input, 0.3);
  at::manual_seed(kSeed);
  EXPECT_TRUE(same(ours, at::dropout(input, 0.3, true)));
}

TEST(Dropout, InPlaceTheSameSeedGivesTorchsValuesAndGradients) {
  for (const auto& [name, numbers] : tests::layouts(at::kFloat)) {
    if (name == "expanded") {
      continue;  // elements share memory
    }
    const at::Tensor ours = numbers.detach().clone().requires_grad_();
    const at::Tensor torchs = ours.detach().requires_grad_();
    at::Tensor our_value = ours.mul(2);
    at::Tensor torchs_value = torchs.mul(2);
    at::manual_seed(kSeed);
    EXPECT_TRUE(functional::dropout(our_value, 0.4, true, true).is_same(our_value)) << name;
    at::manual_seed(kSeed);
    at::dropout_(torchs_value, 0.4, true);
    EXPECT_TRUE(same(our_value, torchs_value)) << name;
    const at::Tensor cotangent = at::randn_like(numbers);
    our_value.backward(cotangent);
    torchs_value.backward(cotangent);
    EXPECT_TRUE(same(ours.grad(), torchs.grad())) << name;
  }
}

TEST(Dropout, KeepsOneBitAnElement) {
  const at::Tensor input = normal_numbers({1000, 80}, at::kFloat).requires_grad_();
  const PeakMeter meter(at::kCPU);
  const at::Tensor output = functional::dropout(input, 0.1);
  EXPECT_EQ(meter.left(), 1000 * 80 * 4 + 1000 * 80 / 8);
  EXPECT_LE(meter.peak(), 2 * 1000 * 80 * 4);  // torch: the random numbers and the output
}

TEST(Dropout, DroppingAllKeepsNothingAndGivesZerosForInfToo) {
  const at::Tensor input = at::full({100}, std::numeric_limits<double>::infinity(),
                                    at::TensorOptions().dtype(at::kFloat))
                               .requires_grad_();
  const PeakMeter meter(at::kCPU);
  const at::Tensor output = functional::dropout(input, 1.0);
  EXPECT_EQ(meter.left(), 400);
  EXPECT_TRUE(output.eq(0).all().item<bool>());
  output.sum().backward();
  EXPECT_TRUE(input.grad().eq(0).all().item<bool>());
}

TEST(Dropout, DroppedInfinitiesAreZero) {
  const at::Tensor input = at::full({200}, std::numeric_limits<double>::infinity(),
                                    at::TensorOptions().dtype(at::kFloat))
                               .requires_grad_();
  at::manual_seed(kSeed);
  const at::Tensor output = functional::dropout(input, 0.5);
  at::manual_seed(kSeed);
  const at::Tensor ones = at::dropout(at::ones({200}, input.options()), 0.5, true);
  EXPECT_TRUE(output.eq(0).equal(ones.eq(0)));
  EXPECT_FALSE(output.isnan().any().item<bool>());
}

TEST(Dropout, WhereNothingIsDroppedTheInputItselfComesBack) {
  const at::Tensor input = normal_numbers({10}, at::kFloat).requires_grad_();
  EXPECT_TRUE(functional::dropout(input, 0.0).is_same(input));
  EXPECT_TRUE(functional::dropout(input, 0.5, /*training=*/false).is_same(input));
  const at::Tensor empty = normal_numbers({0, 3}, at::kFloat).requires_grad_();
  EXPECT_TRUE(functional::dropout(empty, 0.5).is_same(empty));
}

TEST(Dropout, TwoDerivativesPassTheSameElements) {
  const at::Tensor input = normal_numbers({100}, at::kDouble).requires_grad_();
  const at::Tensor output = functional::dropout(input, 0.5);
  const at::Tensor cotangent = normal_numbers({100}, at::kDouble).requires_grad_();
  const at::Tensor first = torch::autograd::grad({output}, {input}, {cotangent},
                                                 /*retain_graph=*/true, /*create_graph=*/true)[0];
  const at::Tensor second = torch::autograd::grad({first}, {cotangent}, {at::ones_like(first)})[0];
  EXPECT_TRUE(same(second.mul(input.detach()), output.detach()));
}

TEST(Dropout, ALayerBehindCanAskForTheOutputAgain) {
  const at::Tensor numbers = normal_numbers({64, 32}, at::kFloat);
  const at::Tensor weights = normal_numbers({16, 32}, at::kFloat);
  const auto run = [&](bool recompute) {
    const at::Tensor x = numbers.detach().requires_grad_();
    const at::Tensor weight = weights.detach().requires_grad_();
    at::manual_seed(kSeed);
    const PeakMeter meter(at::kCPU);
    const at::Tensor output = functional::linear(
        functional::dropout(functional::layer_norm(x, {32}), 0.3), weight, std::nullopt, recompute);
    const std::int64_t kept = meter.left();
    output.sum().backward();
    return std::tuple(kept, x.grad(), weight.grad());
  };
  const auto [kept, input_grad, weight_grad] = run(false);
  const auto [kept_asking, input_grad_asking, weight_grad_asking] = run(true);
  EXPECT_EQ(kept - kept_asking, 64 * 32 * 4);
  EXPECT_TRUE(same(input_grad, input_grad_asking));
  EXPECT_TRUE(same(weight_grad, weight_grad_asking));
}

TEST(Dropout, AProbabilityOutsideZeroToOneIsNamed) {
  const at::Tensor input = normal_numbers({4}, at::kFloat);
  for (const double p : {-0.1, 1.1, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_CONTAINS(message_of<c10::ValueError>([&] { functional::dropout(input, p); }),
                    "p must be from 0 to 1, got ");
  }
}

}  // namespace
}  // namespace brim::nn
