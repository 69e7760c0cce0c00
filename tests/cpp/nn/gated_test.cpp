#include <ATen/ops/erf.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/tanh.h>
#include <brim/nn/rerun.h>

#include <cmath>
#include <numbers>

#include "nn/autocast_on.h"
#include "nn/norm_support.h"
#include "nn/reference.h"
#include "tensors.h"

// tests/python/test_nn_gated.py goes through all activations, types, layouts and transforms.

namespace brim::tests {
namespace {

namespace F = nn::functional;

at::Tensor new_gelu(const at::Tensor& x) {
  const at::Tensor half = x * 0.5;
  const at::Tensor inner = (x + at::pow(x, 3.0) * 0.044715) * std::sqrt(2.0 / std::numbers::pi);
  return half * (at::tanh(inner) + 1.0);
}

void expect_same(const Layer& ours, const Layer& torchs, const Tensors& tensors, unsigned mask) {
  const at::Tensor cotangent = at::randn_like(torchs(tensors));
  const Outcome mine = outcome_of(ours, leaves(tensors, mask), cotangent);
  const Outcome theirs = outcome_of(torchs, leaves(tensors, mask), cotangent);
  EXPECT_TRUE(same(mine.output, theirs.output));
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_EQ(mine.grads[i].defined(), theirs.grads[i].defined());
    if (mine.grads[i].defined()) {
      EXPECT_TRUE(same(mine.grads[i], theirs.grads[i])) << "tensor " << i;
    }
  }
}

TEST(Gated, IsTheActivationTimesTheOtherTensor) {
  for (const at::ScalarType type : kFloatingTypes) {
    const Tensors tensors{normal({6, 40}, type), normal({6, 40}, type)};
    for (unsigned mask = 1; mask < 4; ++mask) {
      expect_same([](const Tensors& t) { return F::gated(t[0], t[1]); },
                  [](const Tensors& t) { return at::silu(t[0]) * t[1]; }, tensors, mask);
      expect_same([](const Tensors& t) { return F::gated(t[0], t[1], "new_gelu"); },
                  [](const Tensors& t) { return new_gelu(t[0]) * t[1]; }, tensors, mask);
    }
    expect_same([](const Tensors& t) { return F::gated_packed(t[0], "gelu", false); },
                [](const Tensors& t) {
                  const auto halves = t[0].chunk(2, -1);
                  return halves[0] * at::gelu(halves[1]);
                },
                {normal({6, 40}, type)}, 1);
    expect_same([](const Tensors& t) { return F::activation(t[0], "new_gelu"); },
                [](const Tensors& t) { return new_gelu(t[0]); }, {normal({6, 40}, type)}, 1);
  }
}

TEST(Gated, LinearLayerBehindAsksForTheProduct) {
  const at::Tensor gate = normal({64, 32}).requires_grad_();
  const at::Tensor up = normal({64, 32}).requires_grad_();
  const at::Tensor weight = normal({8, 32}).requires_grad_();
  at::Tensor output;
  const PeakMeter meter(at::kCPU);
  output = F::linear(F::gated(gate, up), weight, {}, /*recompute=*/true);
  EXPECT_EQ(meter.left(), static_cast<std::int64_t>(output.nbytes()));
  const auto ours = torch::autograd::grad({output}, {weight}, {at::ones_like(output)});
  const at::Tensor reference = at::linear(at::silu(gate) * up, weight);
  const auto torchs = torch::autograd::grad({reference}, {weight}, {at::ones_like(reference)});
  EXPECT_TRUE(same(ours[0], torchs[0]));
}

TEST(Gated, RefusesUnknownNames) {
  const at::Tensor x = normal({2, 4});
  EXPECT_CONTAINS(message_of<c10::ValueError>([&] { (void)F::gated(x, x, "selu"); }), "got selu");
  EXPECT_CONTAINS(message_of<c10::ValueError>([&] { (void)F::gated_packed(normal({2, 3})); }),
                  "even size in dimension -1, got 3");
}

TEST(Rerun, IsTheFunction) {
  const auto function = [](const Tensors& t) { return at::tanh(at::exp(t[0]) * t[1]) * t[0]; };
  for (unsigned mask = 1; mask < 4; ++mask) {
    expect_same([&](const Tensors& t) { return F::rerun(function, t); }, function,
                {normal({6, 4}), normal({4})}, mask);
  }
}

TEST(Rerun, KeepsItsInputsAlone) {
  const at::Tensor x = normal({64, 64}).requires_grad_();
  const auto function = [](const Tensors& t) { return at::erf(at::exp(t[0])) * t[0]; };
  at::Tensor output;
  const PeakMeter meter(at::kCPU);
  output = F::rerun(function, {x * 2});
  EXPECT_EQ(meter.left(), static_cast<std::int64_t>(2 * output.nbytes()));
}

TEST(Rerun, HasTheAutocastOfForwardInBackward) {
  const at::Tensor weight = normal({8, 8});
  const auto function = [&](const Tensors& t) { return at::linear(t[0], weight) * t[0]; };
  const at::Tensor x = normal({4, 8});
  const auto grad_of = [&](const Layer& layer) {
    const at::Tensor leaf = x.detach().requires_grad_();
    at::Tensor output;
    {
      const AutocastOn autocast(at::kBFloat16);
      output = layer({leaf});
    }
    return torch::autograd::grad({output}, {leaf}, {at::ones_like(output)})[0];
  };
  const Layer ours = [&](const Tensors& t) { return F::rerun(function, t); };
  EXPECT_TRUE(same(grad_of(ours), grad_of(function)));
  EXPECT_FALSE(same(grad_of(ours), [&] {  // without autocast it is another gradient
    const at::Tensor leaf = x.detach().requires_grad_();
    const at::Tensor output = function({leaf});
    return torch::autograd::grad({output}, {leaf}, {at::ones_like(output)})[0];
  }()));
}

TEST(Rerun, FindsGradientsThatWouldBeLost) {
  const at::Tensor hidden = normal({4}).requires_grad_();
  const at::Tensor output = F::rerun([&](const Tensors& t) { return t[0] * at::exp(hidden); },
                                     {normal({4}).requires_grad_()});
  EXPECT_CONTAINS(message_of<c10::Error>([&] { output.sum().backward(); }),
                  "not one of its inputs");
  EXPECT_CONTAINS(message_of<c10::ValueError>([] { (void)F::rerun({}, {}); }),
                  "at least one input");
}

}  // namespace
}  // namespace brim::tests
