#include <ATen/ops/hardtanh.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/tensor.h>
#include <brim/memory/peak_meter.h>
#include <brim/nn/functional.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <utility>

#include "nn/reference.h"
#include "tensors.h"

namespace brim::nn {
namespace {

using tests::kFloatingTypes;
using tests::message_of;
using tests::normal_numbers;
using tests::same;

struct Case {
  std::string name;
  std::function<at::Tensor(const at::Tensor&)> ours;
  std::function<at::Tensor(const at::Tensor&)> torchs;
};

/// Bounds and slopes that bfloat16 cannot hold exactly are among them.
const std::vector<Case>& cases() {
  static const std::vector<Case> all{
      {"relu", [](const at::Tensor& x) { return functional::relu(x); },
       [](const at::Tensor& x) { return at::relu(x); }},
      {"relu6", [](const at::Tensor& x) { return functional::relu6(x); },
       [](const at::Tensor& x) { return at::hardtanh(x, 0, 6); }},
      {"hardtanh", [](const at::Tensor& x) { return functional::hardtanh(x, -0.3, 0.7); },
       [](const at::Tensor& x) { return at::hardtanh(x, -0.3, 0.7); }},
      {"leaky_relu", [](const at::Tensor& x) { return functional::leaky_relu(x, 0.01); },
       [](const at::Tensor& x) { return at::leaky_relu(x, 0.01); }},
      {"leaky_relu up", [](const at::Tensor& x) { return functional::leaky_relu(x, -2); },
       [](const at::Tensor& x) { return at::leaky_relu(x, -2); }},
  };
  return all;
}

/// Values and gradients of both on the same numbers.
void expect_equal(const Case& c, const at::Tensor& numbers, const std::string& where) {
  const at::Tensor ours = numbers.detach().requires_grad_();
  const at::Tensor torchs = numbers.detach().requires_grad_();
  const at::Tensor our_value = c.ours(ours);
  const at::Tensor torchs_value = c.torchs(torchs);
  EXPECT_TRUE(same(our_value, torchs_value)) << c.name << ", " << where;
  EXPECT_EQ(our_value.strides(), torchs_value.strides()) << c.name << ", " << where;
  const at::Tensor cotangent = at::randn_like(numbers);
  our_value.backward(cotangent);
  torchs_value.backward(cotangent);
  EXPECT_TRUE(same(ours.grad(), torchs.grad())) << c.name << ", " << where;
}

TEST(BitmaskActivations, ValuesAndGradientsAreTorchsInEveryTypeAndSize) {
  for (const Case& c : cases()) {
    for (const at::ScalarType type : kFloatingTypes) {
      for (const std::int64_t n : {0, 1, 7, 8, 63, 64, 65, 1000, 100003}) {
        expect_equal(c, normal_numbers({n}, type).mul_(3),
                     std::string(c10::toString(type)) + ", " + std::to_string(n));
      }
    }
  }
}

TEST(BitmaskActivations, KeepOneBitPerElement) {
  const at::Tensor input = normal_numbers({1000, 80}, at::kFloat).requires_grad_();
  for (const Case& c : cases()) {
    const PeakMeter meter(at::kCPU);
    const at::Tensor output = c.ours(input);
    EXPECT_EQ(meter.left(), 1000 * 80 * 4 + 1000 * 80 / 8) << c.name;
  }
}

/// linear(activation(x)): bytes left after forward, beyond the result; gradients of x and of the
/// weight.
struct Chain {
  std::int64_t kept = 0;
  at::Tensor input_grad, weight_grad;
};

Chain run_chain(const Case& c, const at::Tensor& numbers, const at::Tensor& weights, bool trained) {
  const at::Tensor x = numbers.detach().requires_grad_();
  const at::Tensor weight = weights.detach().requires_grad_(trained);
  const PeakMeter meter(at::kCPU);
  const at::Tensor output = functional::linear(c.ours(x), weight);
  const std::int64_t kept = meter.left() - static_cast<std::int64_t>(output.nbytes());
  output.sum().backward();
  return {kept, x.grad(), weight.grad()};
}

TEST(BitmaskActivations, DropTheirBitsWhereTheConsumerKeepsTheOutput) {
  const at::Tensor numbers = normal_numbers({64, 256}, at::kFloat).mul_(3);
  const at::Tensor weights = normal_numbers({8, 256}, at::kFloat);
  for (const Case& c : cases()) {
    const std::int64_t bits = 64 * 256 / 8;
    const std::int64_t output = 64 * 256 * 4;
    // The output of a slope under zero does not tell its input's sign.
    const bool tells = c.name != "leaky_relu up";
    const Chain frozen = run_chain(c, numbers, weights, false);
    const Chain trained = run_chain(c, numbers, weights, true);
    EXPECT_EQ(frozen.kept, bits) << c.name;
    EXPECT_EQ(trained.kept, output + (tells ? 0 : bits)) << c.name;

    const at::Tensor x = numbers.detach().requires_grad_();
    const at::Tensor weight = weights.detach().requires_grad_();
    at::linear(c.torchs(x), weight).sum().backward();
    EXPECT_TRUE(same(frozen.input_grad, x.grad())) << c.name;
    EXPECT_TRUE(same(trained.input_grad, x.grad())) << c.name;
    EXPECT_TRUE(same(trained.weight_grad, weight.grad())) << c.name;
  }
}

TEST(BitmaskActivations, BoundsThatTheTypeCannotHoldGiveTorchsGradientsWhereTheOutputIsKept) {
  const Case& hardtanh = cases()[2];
  const at::Tensor numbers = at::tensor({-0.3, 0.7, -0.31, 0.71, 0.0, 6.0}).to(at::kBFloat16);
  const at::Tensor weights = normal_numbers({3, 6}, at::kBFloat16);
  const Chain ours = run_chain(hardtanh, numbers.unsqueeze(0), weights, true);
  const at::Tensor x = numbers.unsqueeze(0).requires_grad_();
  at::linear(hardtanh.torchs(x), weights).sum().backward();
  EXPECT_TRUE(same(ours.input_grad, x.grad()));
}

/// What a normalisation, a ReLU and a frozen linear layer keep of `x`, and the gradient.
std::pair<std::int64_t, at::Tensor> kept_behind_a_norm(const at::Tensor& x, bool recompute,
                                                       bool write) {
  const at::Tensor weight = at::ones({4, x.size(1)});
  const PeakMeter meter(at::kCPU);
  at::Tensor loss;
  {
    const at::Tensor normal = functional::layer_norm(x, {x.size(1)});
    if (write) {
      const at::NoGradGuard without;
      normal.add_(1);
    }
    loss = functional::linear(functional::relu(normal, false, recompute), weight).sum();
  }
  const std::int64_t left = meter.left();
  return {left, torch::autograd::grad({loss}, {x})[0]};
}

TEST(BitmaskActivations, KeepNoBitsWhereTheLayerBeforeCanGiveItsOutputAgain) {
  const at::Tensor x = normal_numbers({16, 64}, at::kFloat).requires_grad_();
  const auto [bits, expected] = kept_behind_a_norm(x, false, false);
  const auto [nothing, gradient] = kept_behind_a_norm(x, true, false);
  EXPECT_EQ(bits - nothing, 16 * 64 / 8);
  EXPECT_TRUE(same(gradient, expected));
}

TEST(BitmaskActivations, AskNobodyForAValueThatSomebodyWroteTo) {
  const at::Tensor x = normal_numbers({16, 64}, at::kFloat).requires_grad_();
  const auto [bits, expected] = kept_behind_a_norm(x, false, true);
  const auto [kept, gradient] = kept_behind_a_norm(x, true, true);
  EXPECT_EQ(kept, bits);
  EXPECT_TRUE(same(gradient, expected));
}

TEST(BitmaskActivations, HardtanhNamesBoundsThatAreNoRange) {
  const at::Tensor input = normal_numbers({4}, at::kFloat);
  const std::string message =
      message_of<c10::ValueError>([&] { functional::hardtanh(input, 2.0, 1.0); });
  EXPECT_CONTAINS(message, "min_val must not be above max_val, got 2 and 1");
}

}  // namespace
}  // namespace brim::nn
