#include "nn/ops/bitmask_activation.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <ATen/ops/hardtanh.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/tensor.h>
#include <brim/memory/peak_meter.h>
#include <brim/nn/functional.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <functional>
#include <limits>
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
  std::function<at::Tensor(const at::Tensor&, bool)> ours;
  std::function<at::Tensor(const at::Tensor&)> torchs;
  std::function<at::Tensor&(at::Tensor&)> torchs_in_place;
};

/// Bounds and slopes that bfloat16 cannot hold exactly are among them.
const std::vector<Case>& cases() {
  static const std::vector<Case> all{
      {"relu", [](const at::Tensor& x, bool inplace) { return functional::relu(x, inplace); },
       [](const at::Tensor& x) { return at::relu(x); },
       [](at::Tensor& x) -> at::Tensor& { return at::relu_(x); }},
      {"relu6", [](const at::Tensor& x, bool inplace) { return functional::relu6(x, inplace); },
       [](const at::Tensor& x) { return at::hardtanh(x, 0, 6); },
       [](at::Tensor& x) -> at::Tensor& { return at::hardtanh_(x, 0, 6); }},
      {"hardtanh",
       [](const at::Tensor& x, bool inplace) {
         return functional::hardtanh(x, -0.3, 0.7, inplace);
       },
       [](const at::Tensor& x) { return at::hardtanh(x, -0.3, 0.7); },
       [](at::Tensor& x) -> at::Tensor& { return at::hardtanh_(x, -0.3, 0.7); }},
      {"leaky_relu",
       [](const at::Tensor& x, bool inplace) { return functional::leaky_relu(x, 0.01, inplace); },
       [](const at::Tensor& x) { return at::leaky_relu(x, 0.01); },
       [](at::Tensor& x) -> at::Tensor& { return at::leaky_relu_(x, 0.01); }},
      {"leaky_relu up", [](const at::Tensor& x, bool) { return functional::leaky_relu(x, -2); },
       [](const at::Tensor& x) { return at::leaky_relu(x, -2); }, nullptr},
  };
  return all;
}

/// Values and gradients of both on the same numbers.
void expect_equal(const Case& c, const at::Tensor& numbers, const std::string& where) {
  const at::Tensor ours = numbers.detach().requires_grad_();
  const at::Tensor torchs = numbers.detach().requires_grad_();
  const at::Tensor our_value = c.ours(ours, false);
  const at::Tensor torchs_value = c.torchs(torchs);
  EXPECT_TRUE(same(our_value, torchs_value)) << c.name << ", " << where;
  EXPECT_EQ(our_value.strides(), torchs_value.strides()) << c.name << ", " << where;
  const at::Tensor cotangent = at::randn_like(numbers);
  our_value.backward(cotangent);
  torchs_value.backward(cotangent);
  EXPECT_TRUE(same(ours.grad(), torchs.grad())) << c.name << ", " << where;
}

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

/// Where the rules are: infinities, both zeros, bounds as each type holds them, and neighbours.
at::Tensor special_numbers(at::ScalarType type) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const std::vector<double> numbers{kInf, -kInf, 0.0,  -0.0,  6.0,  -6.0,   -0.3,
                                    0.7,  -0.31, 0.71, 5.999, 6.01, 1e-300, -1e-300};
  return at::tensor(numbers, at::TensorOptions().dtype(at::kDouble)).to(type);
}

TEST(Gates, ValuesAndGradientsAreTorchsInEveryTypeAndSize) {
  for (const Case& c : cases()) {
    for (const at::ScalarType type : kFloatingTypes) {
      for (const std::int64_t n : {0, 1, 7, 8, 63, 64, 65, 1000, 100003}) {
        expect_equal(c, normal_numbers({n}, type).mul_(3),
                     std::string(c10::toString(type)) + ", " + std::to_string(n));
      }
    }
  }
}

TEST(Gates, InfinitiesZerosAndBoundsFollowTorchsRules) {
  for (const Case& c : cases()) {
    for (const at::ScalarType type : kFloatingTypes) {
      expect_equal(c, special_numbers(type), c10::toString(type));
      expect_equal(c, special_numbers(type).repeat({10}), c10::toString(type));  // whole blocks
    }
  }
}

TEST(Gates, NaNFollowsTorchsRules) {
  for (const Case& c : cases()) {
    for (const at::ScalarType type : kFloatingTypes) {
      for (const double sign : {1.0, -1.0}) {
        // Few: over more, torch's hardtanh drops the gradient in the vectors, and not at the end.
        expect_equal(c, at::full({2}, std::copysign(kNaN, sign), at::TensorOptions().dtype(type)),
                     c10::toString(type));
      }
    }
  }
}

TEST(Gates, NaNFollowsTheSameRuleInEveryPlace) {
  for (const Case& c : cases()) {
    for (const at::ScalarType type : kFloatingTypes) {
      const at::Tensor input =
          at::full({200}, kNaN, at::TensorOptions().dtype(type)).requires_grad_();
      const at::Tensor output = c.ours(input, false);
      EXPECT_TRUE(output.isnan().all().item<bool>()) << c.name << ", " << type;
      output.backward(at::ones_like(output));
      EXPECT_TRUE(same(input.grad(), input.grad()[0].expand({200}))) << c.name << ", " << type;
    }
  }
}

TEST(Gates, EveryLayoutGivesTorchsValuesAndGradients) {
  for (const Case& c : cases()) {
    for (const auto& [name, numbers] : tests::layouts(at::kFloat)) {
      expect_equal(c, numbers, name);
    }
  }
}

TEST(Gates, InPlaceGivesTorchsValuesAndGradientsAndTheSameTensor) {
  for (const Case& c : cases()) {
    if (!c.torchs_in_place) {
      continue;  // torch refuses a negative slope in place
    }
    for (const auto& [name, numbers] : tests::layouts(at::kFloat)) {
      if (name == "expanded") {
        continue;  // elements share memory
      }
      const at::Tensor ours = numbers.detach().clone().requires_grad_();
      const at::Tensor torchs = ours.detach().requires_grad_();
      // Not leaves any more, and laid out as `numbers` is.
      const auto prepared = [&](const at::Tensor& leaf) {
        return at::empty_strided(numbers.sizes(), numbers.strides(), numbers.options())
            .copy_(leaf)
            .mul_(3);
      };
      at::Tensor our_value = prepared(ours);
      at::Tensor torchs_value = prepared(torchs);
      const auto version = our_value._version();
      EXPECT_TRUE(c.ours(our_value, true).is_same(our_value)) << c.name << ", " << name;
      EXPECT_EQ(our_value._version(), version + 1) << c.name << ", " << name;
      c.torchs_in_place(torchs_value);
      EXPECT_TRUE(same(our_value, torchs_value)) << c.name << ", " << name;
      const at::Tensor cotangent = at::randn_like(numbers);
      our_value.backward(cotangent);
      torchs_value.backward(cotangent);
      EXPECT_TRUE(same(ours.grad(), torchs.grad())) << c.name << ", " << name;
    }
  }
}

TEST(Gates, InPlaceOnALeafIsRefused) {
  const at::Tensor leaf = normal_numbers({4}, at::kFloat).requires_grad_();
  EXPECT_CONTAINS(message_of<c10::Error>([&] { functional::relu(leaf, true); }),
                  "a leaf Variable that requires grad");
}

TEST(Gates, KeepOneBitAnElement) {
  const at::Tensor input = normal_numbers({1000, 80}, at::kFloat).requires_grad_();
  for (const Case& c : cases()) {
    const PeakMeter meter(at::kCPU);
    const at::Tensor output = c.ours(input, false);
    EXPECT_EQ(meter.left(), 1000 * 80 * 4 + 1000 * 80 / 8) << c.name;
  }
}

TEST(Gates, KeepNothingWhereNoGradientIsNeeded) {
  const at::Tensor input = normal_numbers({1000, 80}, at::kFloat);
  for (const Case& c : cases()) {
    const PeakMeter meter(at::kCPU);
    const at::Tensor output = c.ours(input, false);
    EXPECT_EQ(meter.peak(), 1000 * 80 * 4) << c.name;
    EXPECT_EQ(output.grad_fn(), nullptr) << c.name;
  }
}

/// linear(gate(x)): bytes left after forward, beyond the result; gradients of x and of the weight.
struct Chain {
  std::int64_t kept = 0;
  at::Tensor input_grad, weight_grad;
};

Chain run_chain(const Case& c, const at::Tensor& numbers, const at::Tensor& weights, bool trained) {
  const at::Tensor x = numbers.detach().requires_grad_();
  const at::Tensor weight = weights.detach().requires_grad_(trained);
  const PeakMeter meter(at::kCPU);
  const at::Tensor output = functional::linear(c.ours(x, false), weight);
  const std::int64_t kept = meter.left() - static_cast<std::int64_t>(output.nbytes());
  output.sum().backward();
  return {kept, x.grad(), weight.grad()};
}

TEST(Gates, DropTheirBitsWhereTheConsumerKeepsTheOutput) {
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

TEST(Gates, BoundsThatTheTypeCannotHoldGiveTorchsGradientsAlsoWhereTheOutputIsKept) {
  const Case& hardtanh = cases()[2];
  const at::Tensor numbers = special_numbers(at::kBFloat16).slice(0, 2).unsqueeze(0);
  const at::Tensor weights = normal_numbers({3, numbers.size(1)}, at::kBFloat16);
  const Chain ours = run_chain(hardtanh, numbers, weights, true);
  const at::Tensor x = numbers.detach().requires_grad_();
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

TEST(Gates, KeepNoBitsWhereTheLayerBeforeCanGiveItsOutputAgain) {
  const at::Tensor x = normal_numbers({16, 64}, at::kFloat).requires_grad_();
  const auto [bits, expected] = kept_behind_a_norm(x, false, false);
  const auto [nothing, gradient] = kept_behind_a_norm(x, true, false);
  EXPECT_EQ(bits - nothing, 16 * 64 / 8);
  EXPECT_TRUE(same(gradient, expected));
}

TEST(Gates, AskNobodyForAValueThatSomebodyWroteTo) {
  const at::Tensor x = normal_numbers({16, 64}, at::kFloat).requires_grad_();
  const auto [bits, expected] = kept_behind_a_norm(x, false, true);
  const auto [kept, gradient] = kept_behind_a_norm(x, true, true);
  EXPECT_EQ(kept, bits);
  EXPECT_TRUE(same(gradient, expected));
}

TEST(Gates, HardtanhNamesBoundsThatAreNoRange) {
  const at::Tensor input = normal_numbers({4}, at::kFloat);
  const std::string message =
      message_of<c10::ValueError>([&] { functional::hardtanh(input, 2.0, 1.0); });
  EXPECT_CONTAINS(message, "min_val must be below max_val, got 2 and 1");
}

}  // namespace
}  // namespace brim::nn
