#include <ATen/ops/elu.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/hardswish.h>
#include <ATen/ops/prelu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/tanh.h>
#include <brim/nn/functional.h>

#include "nn/norm_support.h"
#include "tensors.h"

namespace brim::tests {
namespace {

namespace F = nn::functional;

struct Pair {
  const char* name;
  Layer brim;
  Layer torch;
};

const std::vector<Pair>& pairs() {
  static const std::vector<Pair> kPairs{
      {"gelu", [](const Tensors& t) { return F::gelu(t[0]); },
       [](const Tensors& t) { return at::gelu(t[0]); }},
      {"gelu tanh", [](const Tensors& t) { return F::gelu(t[0], "tanh"); },
       [](const Tensors& t) { return at::gelu(t[0], "tanh"); }},
      {"silu", [](const Tensors& t) { return F::silu(t[0]); },
       [](const Tensors& t) { return at::silu(t[0]); }},
      {"silu in place", [](const Tensors& t) { return F::silu(t[0].mul(2), true); },
       [](const Tensors& t) {
         at::Tensor twice = t[0].mul(2);
         return at::silu_(twice);
       }},
      {"hardswish", [](const Tensors& t) { return F::hardswish(t[0]); },
       [](const Tensors& t) { return at::hardswish(t[0]); }},
      {"softplus", [](const Tensors& t) { return F::softplus(t[0], 2, 1); },
       [](const Tensors& t) { return at::softplus(t[0], 2, 1); }},
      {"elu", [](const Tensors& t) { return F::elu(t[0], 0.5); },
       [](const Tensors& t) { return at::elu(t[0], 0.5); }},
      {"elu in place", [](const Tensors& t) { return F::elu(t[0].mul(2), 0.5, true); },
       [](const Tensors& t) {
         at::Tensor twice = t[0].mul(2);
         return at::elu_(twice, 0.5);
       }},
      {"sigmoid", [](const Tensors& t) { return F::sigmoid(t[0]); },
       [](const Tensors& t) { return at::sigmoid(t[0]); }},
      {"tanh", [](const Tensors& t) { return F::tanh(t[0]); },
       [](const Tensors& t) { return at::tanh(t[0]); }}};
  return kPairs;
}

TEST(Activations, EqualsTorch) {
  for (const Pair& pair : pairs()) {
    for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      for (const at::Tensor& input :
           {normal({100}, type), normal({7, 9}, type).t(), normal({0, 3}, type),
            normal({2, 3, 4, 5}, type).contiguous(at::MemoryFormat::ChannelsLast)}) {
        for (const unsigned mask : {0U, 1U}) {
          const Tensors tensors = leaves({input}, mask);
          const at::Tensor cotangent = normal(input.sizes(), type);
          expect_same(outcome_of(pair.brim, tensors, cotangent),
                      outcome_of(pair.torch, tensors, cotangent), 0, 0,
                      c10::str(pair.name, " ", type, " ", input.sizes()));
        }
      }
    }
  }
}

TEST(Activations, KeepWhatTorchKeeps) {
  for (const Pair& pair : pairs()) {
    EXPECT_EQ(kept_bytes(pair.brim, leaves({normal({1024})}, 1)),
              kept_bytes(pair.torch, leaves({normal({1024})}, 1)))
        << pair.name;
    EXPECT_EQ(kept_bytes(pair.brim, leaves({normal({1024})}, 0)), 0) << pair.name;
  }
}

TEST(Activations, TheReluBeforeDropsItsBits) {
  const at::Tensor leaf = normal({4096}).set_requires_grad(true);
  const PeakMeter meter(at::kCPU);
  const at::Tensor middle = F::relu(leaf);
  const std::int64_t with_bits = meter.left();
  const at::Tensor output = F::gelu(middle);
  EXPECT_EQ(with_bits, 4096 * 4 + 4096 / 8);
  EXPECT_EQ(meter.left(), 2 * 4096 * 4);
}

TEST(Activations, GivesItsOutputAgain) {
  for (const Pair& pair : pairs()) {
    expect_recomputes(pair.brim, leaves({normal({8, 50})}, 1), true);
  }
}

TEST(Activations, DifferentiatesTwice) {
  for (const Pair& pair : pairs()) {
    expect_same_second_grads(pair.brim, pair.torch, leaves({normal({20}, at::kDouble)}, 1),
                             normal({20}, at::kDouble), pair.name);
  }
}

TEST(Prelu, KeepsBitsWhereItsWeightIsFrozen) {
  const at::Tensor weight = at::full({1}, 0.25);
  const Layer ours = [&](const Tensors& t) { return F::prelu(t[0], weight); };
  const Layer torchs = [&](const Tensors& t) { return at::prelu(t[0], weight); };
  const Tensors tensors = leaves({normal({1024})}, 1);
  EXPECT_EQ(kept_bytes(ours, tensors), 1024 / 8);
  const at::Tensor cotangent = normal({1024});
  expect_same(outcome_of(ours, tensors, cotangent), outcome_of(torchs, tensors, cotangent), 0, 0,
              "prelu");
}

TEST(Activations, UndefinedGradientGivesNone) {
  for (const Pair& pair : pairs()) {
    const at::Tensor output = pair.brim(leaves({normal({5})}, 1));
    expect_none_from_none(output);
  }
}

TEST(Activations, RefusesOtherArguments) {
  EXPECT_CONTAINS(message_of<c10::Error>([] { F::gelu(normal({3}), "sigmoid"); }), "approximate");
  EXPECT_THROW(F::gelu(normal({3}).to(at::kInt)), c10::Error);
  const at::Tensor leaf = normal({3}).set_requires_grad(true);
  EXPECT_THROW(F::silu(leaf, true), c10::Error);
}

}  // namespace
}  // namespace brim::tests
