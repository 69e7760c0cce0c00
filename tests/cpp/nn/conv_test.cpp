#include <ATen/ops/conv2d.h>
#include <ATen/ops/convolution.h>
#include <brim/nn/functional.h>

#include <random>
#include <sstream>

#include "nn/autocast_on.h"
#include "nn/norm_support.h"
#include "tensors.h"

namespace brim::tests {
namespace {

namespace F = nn::functional;

constexpr unsigned kInput = 1;
constexpr unsigned kWeight = 2;
constexpr unsigned kBias = 4;

using Numbers = std::vector<std::int64_t>;

struct Options {
  Numbers stride{1, 1};
  Numbers padding{0, 0};
  Numbers dilation{1, 1};
  bool transposed = false;
  Numbers output_padding{0, 0};
  std::int64_t groups = 1;
};

Layer torch_conv(const Options& o) {
  return [o](const Tensors& t) {
    const bool batched = t[0].dim() == t[1].dim();
    const at::Tensor output =
        at::convolution(batched ? t[0] : t[0].unsqueeze(0), t[1], option(t[2]), o.stride, o.padding,
                        o.dilation, o.transposed, o.output_padding, o.groups);
    return batched ? output : output.squeeze(0);
  };
}

Layer brim_conv(const Options& o, bool recompute = false) {
  return [o, recompute](const Tensors& t) {
    return o.transposed ? F::conv_transpose(t[0], t[1], option(t[2]), o.stride, o.padding,
                                            o.output_padding, o.groups, o.dilation, recompute)
                        : F::conv(t[0], t[1], option(t[2]), o.stride, o.padding, o.dilation,
                                  o.groups, recompute);
  };
}

struct Case {
  Options options;
  Tensors tensors;
  std::string name;
};

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  std::int64_t of(const Numbers& values) { return values[engine_() % values.size()]; }
  Numbers several(std::size_t count, const Numbers& values) {
    Numbers result(count);
    for (auto& each : result) {
      each = of(values);
    }
    return result;
  }

 private:
  std::mt19937 engine_;
};

Case random_case(Random& random, at::ScalarType type) {
  Case result;
  Options& o = result.options;
  const auto count = static_cast<std::size_t>(random.of({1, 2, 2, 3}));
  o.transposed = random.of({0, 1}) == 1;
  o.groups = random.of({1, 1, 2, 3});
  const std::int64_t in = o.groups * random.of({1, 2, 4});
  const std::int64_t out = o.groups * random.of({1, 3, 4});
  o.stride = random.several(count, {1, 1, 2, 3});
  o.padding = random.several(count, {0, 1, 2});
  o.dilation = random.several(count, {1, 1, 2, 3});
  o.output_padding = Numbers(count, 0);
  for (std::size_t i = 0; o.transposed && i < count; ++i) {
    o.output_padding[i] = random.of({0, 1, 2}) % std::max(o.stride[i], o.dilation[i]);
  }
  Numbers weight{o.transposed ? in : out, (o.transposed ? out : in) / o.groups};
  Numbers input{in};
  for (std::size_t i = 0; i < count; ++i) {
    weight.push_back(random.of({1, 2, 3}));
    input.push_back(random.of({7, 8, 9, 10, 11}));
  }
  if (const std::int64_t batch = random.of({-1, 0, 1, 2, 5}); batch >= 0) {
    input.insert(input.begin(), batch);
  }
  result.tensors = {normal(input, type), normal(weight, type),
                    random.of({0, 1}) == 1 ? normal({out}, type) : at::Tensor()};
  if (result.tensors[0].dim() == 4 && random.of({0, 1}) == 1) {
    result.tensors[0] = result.tensors[0].contiguous(at::MemoryFormat::ChannelsLast);
  }
  std::ostringstream name;
  name << type << " input " << at::IntArrayRef(input) << " weight " << at::IntArrayRef(weight)
       << " stride " << at::IntArrayRef(o.stride) << " padding " << at::IntArrayRef(o.padding)
       << " dilation " << at::IntArrayRef(o.dilation) << " output_padding "
       << at::IntArrayRef(o.output_padding) << (o.transposed ? " transposed" : "") << " groups "
       << o.groups;
  result.name = name.str();
  return result;
}

/// Bit for bit, but for one: without the gradient of the weight, beside which oneDNN makes it, the
/// bias's is a plain sum.
void expect_like_torch(const Outcome& got, const Outcome& want, unsigned mask, at::ScalarType type,
                       const std::string& what) {
  expect_same(got.output, want.output, 0, what + ", output");
  expect_same(got.grads[0], want.grads[0], 0, what + ", input");
  expect_same(got.grads[1], want.grads[1], 0, what + ", weight");
  expect_same(got.grads[2], want.grads[2], (mask & kWeight) != 0 ? 0 : rounding(type),
              what + ", bias");
}

TEST(Conv, ValuesAndGradientsAreThoseOfTorch) {
  Random random(7);
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (int i = 0; i < 60; ++i) {
      const Case c = random_case(random, type);
      for (unsigned mask = 1; mask < 8; ++mask) {
        const Layer reference = torch_conv(c.options);
        const at::Tensor cotangent = at::randn_like(reference(c.tensors));
        expect_like_torch(outcome_of(brim_conv(c.options), leaves(c.tensors, mask), cotangent),
                          outcome_of(reference, leaves(c.tensors, mask), cotangent), mask, type,
                          c.name + " mask " + std::to_string(mask));
      }
    }
  }
}

TEST(Conv, CommonShapesGiveTorchsInputGradientInEveryType) {
  const Options o{.padding = {1, 1}};
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    const Tensors tensors{normal({2, 16, 11, 12}, type), normal({32, 16, 3, 3}, type),
                          at::Tensor()};
    const at::Tensor cotangent = normal({2, 32, 11, 12}, type);
    expect_like_torch(outcome_of(brim_conv(o), leaves(tensors, kInput), cotangent),
                      outcome_of(torch_conv(o), leaves(tensors, kInput), cotangent), kInput, type,
                      c10::toString(type));
  }
}

TEST(Conv, GradientHasTheMemoryFormatOfTheInput) {
  const Options o{.padding = {1, 1}};
  for (const at::MemoryFormat format :
       {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
    for (const std::int64_t channels : {1, 4}) {
      const Tensors tensors{normal({2, 3, 6, 6}).contiguous(format), normal({channels, 3, 3, 3}),
                            at::Tensor()};
      // The other format than the forward pass has.
      const at::Tensor cotangent =
          normal({2, channels, 6, 6})
              .contiguous(format == at::MemoryFormat::Contiguous ? at::MemoryFormat::ChannelsLast
                                                                 : at::MemoryFormat::Contiguous);
      const auto got = outcome_of(brim_conv(o), leaves(tensors, kInput), cotangent).grads[0];
      EXPECT_TRUE(got.is_contiguous(format)) << channels;
    }
  }
}

TEST(Conv, KeepsTheInputOnlyForTheGradientOfTheWeight) {
  for (const bool transposed : {false, true}) {
    const Options o{.padding = {1, 1}, .transposed = transposed};
    for (const bool batched : {true, false}) {
      const Tensors tensors{batched ? normal({2, 4, 6, 6}) : normal({4, 6, 6}),
                            normal({4, 4, 3, 3}), normal({4})};
      const std::int64_t input_bytes = tensors[0].numel() * 4;
      const Layer layer = [&](const Tensors& t) { return brim_conv(o)({t[0].mul(2), t[1], t[2]}); };
      for (unsigned mask = 1; mask < 8; ++mask) {
        EXPECT_EQ(kept_bytes(layer, leaves(tensors, mask)), (mask & kWeight) != 0 ? input_bytes : 0)
            << mask;
      }
    }
  }
}

TEST(Conv, UnfreezingTakesEffectWithTheNextCall) {
  const Options o;
  const Tensors tensors = leaves({normal({2, 3, 6, 6}), normal({4, 3, 3, 3}), normal({4})}, kInput);
  const at::Tensor cotangent = normal({2, 4, 4, 4});
  EXPECT_FALSE(outcome_of(brim_conv(o), tensors, cotangent).grads[1].defined());
  tensors[1].set_requires_grad(true);
  expect_same(outcome_of(brim_conv(o), tensors, cotangent),
              outcome_of(torch_conv(o), tensors, cotangent), 0, 0, "unfrozen");
}

TEST(Conv, SecondDerivativesAreThoseOfTorch) {
  const std::vector<Options> mixes{
      {.stride = {2, 1}, .padding = {1, 0}, .groups = 2},
      {.stride = {2, 1}, .transposed = true, .output_padding = {1, 0}, .groups = 2},
      {.dilation = {3, 1}, .transposed = true, .output_padding = {2, 0}, .groups = 2}};
  for (const Options& o : mixes) {
    for (unsigned mask = 1; mask < 8; ++mask) {
      const Tensors tensors = leaves({normal({2, 4, 5, 6}, at::kDouble),
                                      normal({4, 2, 2, 3}, at::kDouble), normal({4}, at::kDouble)},
                                     mask);
      const at::Tensor cotangent = at::randn_like(torch_conv(o)(tensors).detach());
      expect_same_second_grads(brim_conv(o), torch_conv(o), tensors, cotangent,
                               "mask " + std::to_string(mask));
    }
  }
}

TEST(Conv, WithoutAGradientOfTheOutputThereIsNone) {
  const at::Tensor output =
      brim_conv({})(leaves({normal({2, 3, 6, 6}), normal({4, 3, 3, 3}), normal({4})}, 7));
  for (const at::Tensor& grad : (*output.grad_fn())(torch::autograd::variable_list{at::Tensor()})) {
    EXPECT_FALSE(grad.defined());
  }
}

TEST(Conv, AutocastGivesTorchsValuesAndGradients) {
  const Options o{.padding = {1, 1}};
  const auto under_autocast = [](const Layer& layer) {
    return [layer](const Tensors& t) {
      const AutocastOn autocast(at::kBFloat16);
      return layer(t);
    };
  };
  // torch's rule is on conv2d; plain convolution has none on the CPU.
  const Layer reference = under_autocast(
      [&](const Tensors& t) { return at::conv2d(t[0], t[1], t[2], o.stride, o.padding); });
  for (unsigned mask = 1; mask < 8; ++mask) {
    const Tensors tensors{normal({2, 3, 6, 6}), normal({4, 3, 3, 3}), normal({4})};
    const at::Tensor cotangent = normal({2, 4, 6, 6}, at::kBFloat16);
    expect_like_torch(outcome_of(under_autocast(brim_conv(o)), leaves(tensors, mask), cotangent),
                      outcome_of(reference, leaves(tensors, mask), cotangent), mask, at::kBFloat16,
                      "mask " + std::to_string(mask));
  }
}

TEST(Conv, AutocastKeepsNoCopyOfAFrozenWeight) {
  const Layer layer = [](const Tensors& t) {
    const AutocastOn autocast(at::kBFloat16);
    return brim_conv({})(t);
  };
  const Tensors tensors{normal({2, 3, 6, 6}), normal({4, 3, 3, 3}), normal({4})};
  EXPECT_EQ(kept_bytes(layer, leaves(tensors, kInput)), 0);
  EXPECT_EQ(kept_bytes(layer, leaves(tensors, kInput | kBias)), 0);
}

TEST(Conv, BackwardOfFloat32UnderAutocastStaysFloat32AsInTorch) {
  const Tensors tensors{normal({2, 3, 6, 6}), normal({4, 3, 3, 3}), at::Tensor()};
  const at::Tensor cotangent = normal({2, 4, 4, 4});
  const Tensors given = leaves(tensors, kInput);
  const at::Tensor output = brim_conv({})(given);
  const at::Tensor want = outcome_of(torch_conv({}), leaves(tensors, kInput), cotangent).grads[0];
  const AutocastOn autocast(at::kBFloat16);
  expect_same(torch::autograd::grad({output}, {given[0]}, {cotangent})[0], want, 0, "input");
}

TEST(Conv, AsksTheLayerBeforeForItsInput) {
  const auto after_silu = [](const Layer& layer) {
    return [layer](const Tensors& t) { return layer({F::silu(t[0]), t[1], t[2]}); };
  };
  for (const bool batched : {true, false}) {
    const Tensors tensors{batched ? normal({2, 3, 6, 6}) : normal({3, 6, 6}), normal({4, 3, 3, 3}),
                          normal({4})};
    EXPECT_EQ(kept_bytes(after_silu(brim_conv({})), leaves(tensors, 7)), tensors[0].numel() * 4);
    EXPECT_EQ(kept_bytes(after_silu(brim_conv({}, true)), leaves(tensors, 7)), 0);
    const at::Tensor cotangent = at::randn_like(torch_conv({})(tensors));
    expect_same(outcome_of(after_silu(brim_conv({}, true)), leaves(tensors, 7), cotangent),
                outcome_of(after_silu(brim_conv({})), leaves(tensors, 7), cotangent), 0, 0,
                "asked");
  }
}

TEST(Conv, OneNumberStandsForAllDimensions) {
  const at::Tensor input = normal({2, 3, 9, 9});
  const at::Tensor weight = normal({4, 3, 3, 3});
  const at::Tensor want =
      torch_conv({.stride = {2, 2}, .padding = {1, 1}, .dilation = {2, 2}})({input, weight, {}});
  EXPECT_TRUE(F::conv(input, weight, {}, {2}, {1}, {2}).equal(want));
  EXPECT_TRUE(F::conv(input, weight).equal(torch_conv({})({input, weight, {}})));
}

TEST(Conv, WrongArgumentsAreNamed) {
  const at::Tensor input = normal({2, 3, 6, 6});
  const at::Tensor weight = normal({3, 3, 3, 3});
  const Numbers three{1, 1, 1};
  const auto message = [](const auto& work) { return message_of<c10::Error>(work); };
  EXPECT_CONTAINS(message([&] { F::conv(input, weight, {}, three); }), "stride must have 2");
  EXPECT_CONTAINS(message([&] { F::conv(input, weight, {}, {}, three); }), "padding must have 2");
  EXPECT_CONTAINS(message([&] { F::conv(input, weight, {}, {}, {}, three); }),
                  "dilation must have 2");
  EXPECT_CONTAINS(message([&] { F::conv_transpose(input, weight, {}, {}, {}, three); }),
                  "output_padding must have 2");
  EXPECT_CONTAINS(message([&] { F::conv(input, normal({3, 3})); }), "weight must have 3, 4 or 5");
  EXPECT_CONTAINS(message([&] { F::conv(normal({3, 6}), weight); }), "input must have 4");
  EXPECT_THROW(F::conv(input.to(at::kComplexFloat), weight), c10::Error);
}

}  // namespace
}  // namespace brim::tests
