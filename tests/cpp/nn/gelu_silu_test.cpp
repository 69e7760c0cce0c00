#include <ATen/ops/gelu.h>
#include <ATen/ops/silu.h>
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
       }}};
  return kPairs;
}

TEST(Smooth, EqualsTorch) {
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

TEST(Smooth, KeepsNothingBesideItsInput) {
  for (const Pair& pair : pairs()) {
    // In place: the value that is overwritten, as torch.
    const std::int64_t want = std::string(pair.name) == "silu in place" ? 4096 : 0;
    EXPECT_EQ(kept_bytes(pair.brim, leaves({normal({1024})}, 1)), want) << pair.name;
    EXPECT_EQ(kept_bytes(pair.torch, leaves({normal({1024})}, 1)), want) << pair.name;
    EXPECT_EQ(kept_bytes(pair.brim, leaves({normal({1024})}, 0)), 0) << pair.name;
  }
}

TEST(Smooth, TheReluBeforeDropsItsBits) {
  const at::Tensor leaf = normal({4096}).set_requires_grad(true);
  const PeakMeter meter(at::kCPU);
  const at::Tensor middle = F::relu(leaf);
  const std::int64_t with_bits = meter.left();
  const at::Tensor output = F::gelu(middle);
  EXPECT_EQ(with_bits, 4096 * 4 + 4096 / 8);
  EXPECT_EQ(meter.left(), 2 * 4096 * 4);
}

TEST(Smooth, GivesItsOutputAgain) {
  for (const Pair& pair : pairs()) {
    expect_recomputes(pair.brim, leaves({normal({8, 50})}, 1), true);
  }
}

TEST(Smooth, DifferentiatesTwice) {
  for (const Pair& pair : pairs()) {
    expect_same_second_grads(pair.brim, pair.torch, leaves({normal({20}, at::kDouble)}, 1),
                             normal({20}, at::kDouble), pair.name);
  }
}

TEST(Smooth, UndefinedGradientGivesNone) {
  for (const Pair& pair : pairs()) {
    const at::Tensor output = pair.brim(leaves({normal({5})}, 1));
    expect_none_from_none(output);
  }
}

TEST(Smooth, RefusesOtherArguments) {
  EXPECT_CONTAINS(message_of<c10::Error>([] { F::gelu(normal({3}), "sigmoid"); }), "approximate");
  EXPECT_THROW(F::gelu(normal({3}).to(at::kInt)), c10::Error);
  const at::Tensor leaf = normal({3}).set_requires_grad(true);
  EXPECT_THROW(F::silu(leaf, true), c10::Error);
}

}  // namespace
}  // namespace brim::tests
