#include <ATen/Context.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/full.h>
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

TEST(Dropout, TheSameSeedGivesTorchsValuesGradientsAndNextRandomNumbers) {
  for (const at::ScalarType type : kFloatingTypes) {
    for (const std::int64_t n : {1, 7, 64, 1000, 70001}) {
      const at::Tensor numbers = normal_numbers({n}, type);
      const at::Tensor cotangent = at::randn_like(numbers);
      const auto run = [&](const auto& dropout) {
        const at::Tensor x = numbers.detach().requires_grad_();
        at::manual_seed(kSeed);
        const at::Tensor y = dropout(x);
        const at::Tensor next = at::rand({4}, at::TensorOptions().dtype(at::kFloat));
        y.backward(cotangent);
        return std::tuple(y.detach(), x.grad(), next);
      };
      const auto [value, gradient, next] =
          run([](const at::Tensor& x) { return functional::dropout(x, 0.3); });
      const auto [torchs_value, torchs_gradient, torchs_next] =
          run([](const at::Tensor& x) { return at::dropout(x, 0.3, true); });
      EXPECT_TRUE(same(value, torchs_value)) << type << ", " << n;
      EXPECT_TRUE(same(gradient, torchs_gradient)) << type << ", " << n;
      EXPECT_TRUE(same(next, torchs_next)) << type << ", " << n;
    }
  }
}

TEST(Dropout, KeepsOneBitPerElement) {
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

TEST(Dropout, WhereNothingIsDroppedTheInputItselfComesBack) {
  const at::Tensor input = normal_numbers({10}, at::kFloat).requires_grad_();
  EXPECT_TRUE(functional::dropout(input, 0.0).is_same(input));
  EXPECT_TRUE(functional::dropout(input, 0.5, /*training=*/false).is_same(input));
  const at::Tensor empty = normal_numbers({0, 3}, at::kFloat).requires_grad_();
  EXPECT_TRUE(functional::dropout(empty, 0.5).is_same(empty));
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
