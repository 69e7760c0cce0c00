#include <ATen/ops/linear.h>
#include <brim/nn/functional.h>

#include <random>

#include "nn/autocast_on.h"
#include "nn/norm_support.h"
#include "tensors.h"

namespace brim::tests {
namespace {

namespace F = nn::functional;

constexpr unsigned kInput = 1;
constexpr unsigned kWeight = 2;
constexpr unsigned kBias = 4;
constexpr std::array<at::ScalarType, 4> kTypes{at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};

at::Tensor torch_linear(const Tensors& t) { return at::linear(t[0], t[1], option(t[2])); }
at::Tensor brim_linear(const Tensors& t) { return F::linear(t[0], t[1], option(t[2])); }
at::Tensor asking_linear(const Tensors& t) { return F::linear(t[0], t[1], option(t[2]), true); }

/// Of each number of dimensions and each way to lie in memory.
std::vector<at::Tensor> inputs(at::ScalarType type, std::int64_t features) {
  return {normal({features}, type),
          normal({2 * features}, type).slice(0, 0, 2 * features, 2),
          normal({5, features}, type),
          normal({features, 5}, type).t(),
          normal({0, features}, type),
          normal({2, 3, features}, type),
          normal({3, 2, features}, type).transpose(0, 1),
          normal({features, 3, 2}, type).permute({2, 1, 0}),
          normal({1, 3, features}, type).expand({4, 3, features}),
          normal({2, 0, features}, type),
          normal({2, 3, 4, features}, type),
          normal({2, 3, 4, 2 * features}, type).slice(3, 0, 2 * features, 2),
          normal({4, 3, 2, features}, type).permute({2, 1, 0, 3})};
}

TEST(Linear, ValuesAndGradientsAreThoseOfTorchBitForBit) {
  for (const at::ScalarType type : kTypes) {
    for (const std::int64_t features : {1, 6, 33}) {
      for (const at::Tensor& input : inputs(type, features)) {
        for (const bool transposed_weight : {false, true}) {
          const at::Tensor weight =
              transposed_weight ? normal({features, 4}, type).t() : normal({4, features}, type);
          for (unsigned mask = 1; mask < 16; ++mask) {
            // Bit 3: without a bias.
            const Tensors tensors{input, weight,
                                  (mask & 8) != 0 ? at::Tensor() : normal({4}, type)};
            const at::Tensor cotangent = at::randn_like(torch_linear(tensors));
            expect_same(outcome_of(brim_linear, leaves(tensors, mask), cotangent),
                        outcome_of(torch_linear, leaves(tensors, mask), cotangent), 0, 0,
                        "type " + std::string(c10::toString(type)) + ", dimensions " +
                            std::to_string(input.dim()) + ", mask " + std::to_string(mask));
          }
        }
      }
    }
  }
}

TEST(Linear, KeepsTheInputOnlyForTheGradientOfTheWeight) {
  const Tensors tensors{normal({2, 8, 16}), normal({4, 16}), normal({4})};
  const std::int64_t input_bytes = 2 * 8 * 16 * 4;
  for (unsigned mask = 1; mask < 8; ++mask) {
    const Tensors given = leaves(tensors, mask);
    // The input is made inside, so that it lives on only if it is kept.
    const Layer layer = [&](const Tensors& t) { return brim_linear({t[0].mul(2), t[1], t[2]}); };
    EXPECT_EQ(kept_bytes(layer, given), (mask & kWeight) != 0 ? input_bytes : 0) << mask;
  }
}

TEST(Linear, UnfreezingTakesEffectWithTheNextCall) {
  const Tensors tensors = leaves({normal({3, 5}), normal({2, 5}), normal({2})}, kInput);
  EXPECT_FALSE(outcome_of(brim_linear, tensors, normal({3, 2})).grads[1].defined());
  tensors[1].set_requires_grad(true);
  const at::Tensor cotangent = normal({3, 2});
  expect_same(outcome_of(brim_linear, tensors, cotangent),
              outcome_of(torch_linear, tensors, cotangent), 0, 0, "unfrozen");
}

TEST(Linear, SecondDerivativesAreThoseOfTorch) {
  for (unsigned mask = 1; mask < 8; ++mask) {
    for (const at::Tensor& input :
         {normal({3, 5}, at::kDouble), normal({3, 2, 5}, at::kDouble).transpose(0, 1)}) {
      const Tensors tensors =
          leaves({input, normal({2, 5}, at::kDouble), normal({2}, at::kDouble)}, mask);
      expect_same_second_grads(brim_linear, torch_linear, tensors,
                               at::randn_like(torch_linear(tensors).detach()),
                               "mask " + std::to_string(mask));
    }
  }
}

TEST(Linear, WithoutAGradientOfTheOutputThereIsNone) {
  const at::Tensor output = brim_linear(leaves({normal({3, 5}), normal({2, 5}), normal({2})}, 7));
  for (const at::Tensor& grad : (*output.grad_fn())(torch::autograd::variable_list{at::Tensor()})) {
    EXPECT_FALSE(grad.defined());
  }
}

TEST(Linear, BackwardTwiceIsRefusedAsInTorch) {
  const at::Tensor output = brim_linear(leaves({normal({3, 5}), normal({2, 5}), normal({2})}, 7));
  output.sum().backward();
  const auto message = message_of<c10::Error>([&] { output.sum().backward(); });
  EXPECT_CONTAINS(message, "backward through the graph a second time");
}

TEST(Linear, AutocastGivesTorchsValuesAndGradients) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (unsigned mask = 1; mask < 8; ++mask) {
      const Tensors tensors{normal({2, 3, 5}, type), normal({4, 5}), normal({4})};
      const at::Tensor cotangent = normal({2, 3, 4}, at::kBFloat16);
      const auto under_autocast = [](const Layer& layer) {
        return [layer](const Tensors& t) {
          const AutocastOn autocast(at::kBFloat16);
          return layer(t);
        };
      };
      expect_same(outcome_of(under_autocast(brim_linear), leaves(tensors, mask), cotangent),
                  outcome_of(under_autocast(torch_linear), leaves(tensors, mask), cotangent), 0, 0,
                  "mask " + std::to_string(mask));
    }
  }
}

TEST(Linear, AutocastKeepsNoCopyOfAFrozenWeight) {
  const Layer layer = [](const Tensors& t) {
    const AutocastOn autocast(at::kBFloat16);
    return brim_linear(t);
  };
  const Tensors tensors{normal({2, 16}), normal({32, 16}), normal({32})};
  EXPECT_EQ(kept_bytes(layer, leaves(tensors, kInput)), 0);
  EXPECT_EQ(kept_bytes(layer, leaves(tensors, kInput | kBias)), 0);
}

TEST(Linear, AutocastLeavesFloat64AloneAsTorchDoes) {
  const AutocastOn autocast(at::kBFloat16);
  EXPECT_THROW(brim_linear({normal({2, 5}, at::kDouble), normal({3, 5}), normal({3})}), c10::Error);
  EXPECT_THROW(brim_linear({normal({2, 5}), normal({3, 5}, at::kDouble), normal({3})}), c10::Error);
}

TEST(Linear, TypesMustMatchWithoutAutocast) {
  const Tensors tensors{normal({2, 5}, at::kDouble), normal({3, 5}), normal({3})};
  EXPECT_THROW(brim_linear(leaves(tensors, kInput)), c10::Error);
  EXPECT_THROW(brim_linear(tensors), c10::Error);
}

TEST(Linear, AsksTheLayerBeforeForItsInput) {
  const auto after_silu = [](const Layer& layer) {
    return [layer](const Tensors& t) { return layer({F::silu(t[0]), t[1], t[2]}); };
  };
  const Tensors tensors{normal({8, 16}), normal({4, 16}), normal({4})};
  EXPECT_EQ(kept_bytes(after_silu(brim_linear), leaves(tensors, 7)), 8 * 16 * 4);
  EXPECT_EQ(kept_bytes(after_silu(asking_linear), leaves(tensors, 7)), 0);
  const at::Tensor cotangent = normal({8, 4});
  expect_same(outcome_of(after_silu(asking_linear), leaves(tensors, 7), cotangent),
              outcome_of(after_silu(brim_linear), leaves(tensors, 7), cotangent), 0, 0, "asked");
  const at::Tensor output = after_silu(asking_linear)(leaves(tensors, 7));
  output.sum().backward();
  EXPECT_THROW(output.sum().backward(), c10::Error);
}

TEST(Linear, KeepsWhatCannotBeAskedFor) {
  const Tensors tensors = leaves({normal({8, 16}), normal({4, 16}), normal({4})}, 7);
  const Layer after_exp = [](const Tensors& t) { return asking_linear({t[0].mul(2), t[1], t[2]}); };
  EXPECT_EQ(kept_bytes(after_exp, tensors), 8 * 16 * 4);
}

}  // namespace
}  // namespace brim::tests
