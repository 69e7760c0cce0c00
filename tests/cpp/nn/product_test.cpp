#include <ATen/Context.h>
#include <ATen/ops/mul.h>
#include <brim/nn/functional.h>

#include "nn/norm_support.h"

namespace brim::tests {
namespace {

namespace F = nn::functional;

constexpr unsigned kFirst = 1;
constexpr unsigned kSecond = 2;

at::Tensor ours(const Tensors& t) { return F::mul(t[0], t[1]); }
at::Tensor torchs(const Tensors& t) { return at::mul(t[0], t[1]); }

/// Factors of the same shape, per channel, per sample, crosswise, of two types, a single number.
std::vector<Tensors> factors() {
  return {
      {normal({3, 5, 4}), normal({3, 5, 4})},
      {normal({3, 5, 4}), normal({4})},
      {normal({5, 1, 1}), normal({3, 5, 4, 4})},
      {normal({3, 1}), normal({1, 4})},
      {normal({3, 4}), normal({3, 4}, at::kBFloat16)},
      {normal({3, 4}, at::kBFloat16), normal({})},
      {normal({3, 4, 5}).transpose(1, 2), normal({3, 5, 4})},
      {normal({0, 4}), normal({4})},
  };
}

TEST(Product, HasTorchsValuesGradientsAndStrides) {
  for (const Tensors& pair : factors()) {
    const at::Tensor cotangent = at::randn_like(torchs(pair));
    for (unsigned mask = 0; mask < 4; ++mask) {
      const Tensors given = leaves(pair, mask);
      const Outcome got = outcome_of(ours, given, cotangent);
      const Outcome want = outcome_of(torchs, given, cotangent);
      expect_same(got, want, 0, 0, std::to_string(mask));
      EXPECT_EQ(got.output.strides(), want.output.strides());
    }
  }
}

/// Both factors made for this call, so that nobody else holds them.
Layer of_copies(const Layer& layer) {
  return [=](const Tensors& t) { return layer({t[0].mul(2), t[1].mul(2)}); };
}

TEST(Product, KeepsAFactorOnlyForTheGradientOfTheOther) {
  const Tensors pair{normal({8, 16}), normal({16})};
  const auto first = static_cast<std::int64_t>(pair[0].nbytes());
  const auto second = static_cast<std::int64_t>(pair[1].nbytes());
  EXPECT_EQ(kept_bytes(of_copies(ours), leaves(pair, kFirst)), second);
  EXPECT_EQ(kept_bytes(of_copies(ours), leaves(pair, kSecond)), first);
  EXPECT_EQ(kept_bytes(of_copies(ours), leaves(pair, kFirst | kSecond)), first + second);
  EXPECT_EQ(kept_bytes(of_copies(ours), pair), 0);
}

/// act(a) * b of two values that nobody else holds, with a linear layer behind.
Layer gated(bool recompute) {
  return [=](const Tensors& t) {
    const at::Tensor product = F::mul(F::silu(t[0].mul(2)), t[1].mul(2), recompute);
    return F::linear(product, t[2], {}, recompute);
  };
}

TEST(Product, AsksForItsFactorsAndGivesItsOutputAgain) {
  const Tensors given = leaves({normal({8, 16}), normal({8, 16}), normal({4, 16})}, 7);
  const auto one = static_cast<std::int64_t>(given[0].nbytes());
  EXPECT_EQ(kept_bytes(gated(false), given), 4 * one);
  EXPECT_EQ(kept_bytes(gated(true), given), 2 * one);
  const at::Tensor cotangent = normal({8, 4});
  expect_same(outcome_of(gated(true), given, cotangent), outcome_of(gated(false), given, cotangent),
              0, 0, "gated");
  const at::Tensor output = gated(true)(given);
  output.sum().backward();
  EXPECT_THROW(output.sum().backward(), c10::Error);
}

TEST(Product, ComputesWithTheScaleThatForwardUsed) {
  const auto run = [](bool change) {
    at::Tensor scale = at::ones({16}).requires_grad_();
    const at::Tensor x = at::ones({8, 16}).requires_grad_();
    const at::Tensor weight = at::ones({4, 16}).requires_grad_();
    const at::Tensor output = F::linear(F::mul(scale, F::silu(x), true), weight, {}, true);
    if (change) {
      scale.data().mul_(3);  // no new version: autograd cannot know
    }
    return torch::autograd::grad({output.sum()}, {weight})[0];
  };
  EXPECT_TRUE(run(true).equal(run(false)));
}

Layer sum_of_sums(bool recompute) {
  return [=](const Tensors& t) {
    const at::Tensor value = F::silu(t[0]);
    const at::Tensor sum = F::add(F::add(F::add(value, value), value), value, /*inplace=*/true);
    return F::linear(sum, t[1], {}, recompute);
  };
}

TEST(Sum, OfSumsIsRecomputed) {
  const Tensors given = leaves({normal({8, 16}), normal({4, 16})}, 3);
  EXPECT_EQ(kept_bytes(sum_of_sums(false), given), static_cast<std::int64_t>(given[0].nbytes()));
  EXPECT_EQ(kept_bytes(sum_of_sums(true), given), 0);
  const at::Tensor cotangent = normal({8, 4});
  expect_same(outcome_of(sum_of_sums(true), given, cotangent),
              outcome_of(sum_of_sums(false), given, cotangent), 0, 0, "sums");
}

TEST(Product, OfChangedFactorsIsAnError) {
  const at::Tensor leaf = normal({8, 16}).requires_grad_();
  const at::Tensor first = leaf.mul(2);
  const at::Tensor output = F::mul(first, leaf, true);
  first.add_(1);
  EXPECT_THROW(output.sum().backward(), c10::Error);
}

TEST(Product, HasASecondDerivative) {
  const auto second = [](const Layer& layer) {
    const Tensors given = leaves({normal({4, 3}, at::kDouble), normal({3}, at::kDouble)}, 3);
    const at::Tensor output = layer({given[0].mul(1), given[1]});
    const auto first = torch::autograd::grad({output.pow(2).sum()}, {given[0]}, {}, true, true);
    return torch::autograd::grad({first[0].pow(2).sum()}, given);
  };
  const auto both = [&](const Layer& layer) {
    at::manual_seed(0);
    return second(layer);
  };
  const auto got = both(ours);
  const auto want = both(torchs);
  EXPECT_TRUE(got[0].equal(want[0]));
  EXPECT_TRUE(got[1].equal(want[1]));
}

}  // namespace
}  // namespace brim::tests
