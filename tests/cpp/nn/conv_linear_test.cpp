#include <brim/nn/functional.h>

#include "nn/autocast_on.h"
#include "nn/norm_support.h"
#include "tensors.h"

// What layers with a weight keep, and how they refuse.

namespace brim::tests {
namespace {

namespace F = nn::functional;

constexpr unsigned kInput = 1;
constexpr unsigned kWeight = 2;
constexpr unsigned kBias = 4;
constexpr unsigned kAll = 7;

struct Weighted {
  const char* name;
  Layer layer;
  Layer asking;  // asks the layer before for its input, in backward
  Tensors tensors;
};

std::vector<Weighted> weighted() {
  const auto linear = [](bool recompute) {
    return [=](const Tensors& t) { return F::linear(t[0], t[1], t[2], recompute); };
  };
  const auto conv = [](bool recompute) {
    return
        [=](const Tensors& t) { return F::conv(t[0], t[1], t[2], {}, {1, 1}, {}, 1, recompute); };
  };
  const auto conv_transpose = [](bool recompute) {
    return [=](const Tensors& t) {
      return F::conv_transpose(t[0], t[1], t[2], {}, {1, 1}, {}, 1, {}, recompute);
    };
  };
  const Tensors weights{normal({4, 4, 3, 3}), normal({4})};
  const at::Tensor images = normal({2, 4, 6, 6});
  return {
      {"linear", linear(false), linear(true), {normal({2, 8, 16}), normal({4, 16}), normal({4})}},
      {"conv", conv(false), conv(true), {images, weights[0], weights[1]}},
      {"conv without a batch", conv(false), conv(true), {images[0], weights[0], weights[1]}},
      {"conv_transpose",
       conv_transpose(false),
       conv_transpose(true),
       {images, weights[0], weights[1]}},
  };
}

/// The layer with a value before it that nobody else holds.
Layer behind(at::Tensor (*make)(const at::Tensor&), const Layer& layer) {
  return [=](const Tensors& t) { return layer({make(t[0]), t[1], t[2]}); };
}

at::Tensor twice(const at::Tensor& x) { return x.mul(2); }
at::Tensor silu(const at::Tensor& x) { return F::silu(x); }

TEST(LayersWithAWeight, KeepTheInputOnlyForTheGradientOfTheWeight) {
  for (const Weighted& w : weighted()) {
    const auto bytes = static_cast<std::int64_t>(w.tensors[0].nbytes());
    for (unsigned mask = 1; mask < 8; ++mask) {
      EXPECT_EQ(kept_bytes(behind(twice, w.layer), leaves(w.tensors, mask)),
                (mask & kWeight) != 0 ? bytes : 0)
          << w.name << " " << mask;
    }
  }
}

TEST(LayersWithAWeight, AskTheLayerBeforeForTheirInput) {
  for (const Weighted& w : weighted()) {
    const Tensors tensors = leaves(w.tensors, kAll);
    const auto bytes = static_cast<std::int64_t>(w.tensors[0].nbytes());
    EXPECT_EQ(kept_bytes(behind(silu, w.layer), tensors), bytes) << w.name;
    EXPECT_EQ(kept_bytes(behind(silu, w.asking), tensors), 0) << w.name;
    EXPECT_EQ(kept_bytes(behind(twice, w.asking), tensors), bytes)
        << w.name << ": an operator of torch cannot be asked";
    const at::Tensor cotangent = at::randn_like(w.layer(w.tensors));
    expect_same(outcome_of(behind(silu, w.asking), tensors, cotangent),
                outcome_of(behind(silu, w.layer), tensors, cotangent), 0, 0, w.name);
    const at::Tensor output = behind(silu, w.asking)(tensors);
    output.sum().backward();
    EXPECT_THROW(output.sum().backward(), c10::Error) << w.name;
  }
}

TEST(LayersWithAWeight, KeepNoCopyOfTheWeightUnderAutocast) {
  for (const Weighted& w : weighted()) {
    const Layer layer = [&](const Tensors& t) {
      const AutocastOn autocast(at::kBFloat16);
      return w.asking(t);
    };
    const auto input_in_bfloat16 = static_cast<std::int64_t>(w.tensors[0].nbytes()) / 2;
    for (unsigned mask = 1; mask < 8; ++mask) {
      EXPECT_EQ(kept_bytes(layer, leaves(w.tensors, mask)),
                (mask & kWeight) != 0 ? input_in_bfloat16 : 0)
          << w.name << " " << mask;
    }
  }
}

// -- Products that run again ------------------------------------------------------------------

struct Widening {
  const char* name;
  Layer once;
  Layer again;  // runs again in backward if the next layer asks
  Tensors tensors;
};

/// With an output larger than the input.
std::vector<Widening> widening() {
  const auto linear = [](bool again) {
    return [=](const Tensors& t) { return F::linear(t[0], t[1], t[2], true, again); };
  };
  const auto conv = [](bool again) {
    return
        [=](const Tensors& t) { return F::conv(t[0], t[1], t[2], {}, {1, 1}, {}, 1, true, again); };
  };
  const auto conv_transpose = [](bool again) {
    return [=](const Tensors& t) {
      return F::conv_transpose(t[0], t[1], t[2], {}, {1, 1}, {}, 1, {}, true, again);
    };
  };
  const at::Tensor images = normal({2, 4, 6, 6});
  return {
      {"linear", linear(false), linear(true), {normal({2, 8, 4}), normal({16, 4}), normal({16})}},
      {"conv", conv(false), conv(true), {images, normal({8, 4, 3, 3}), normal({8})}},
      {"conv_transpose",
       conv_transpose(false),
       conv_transpose(true),
       {images, normal({4, 8, 3, 3}), normal({8})}},
  };
}

/// Between two activations, which can be asked and ask.
Layer between(const Layer& layer) {
  return [=](const Tensors& t) {
    return F::silu(layer({F::silu(t[0]), t[1], t[2]}), /*inplace=*/false, /*recompute=*/true);
  };
}

std::int64_t bytes_of(const at::Tensor& tensor) {
  return static_cast<std::int64_t>(tensor.nbytes());
}

TEST(ProductsThatRunAgain, GiveTheirOutputToTheNextLayer) {
  for (const Widening& w : widening()) {
    for (const unsigned mask : {kAll, kInput, kInput | kBias}) {
      const Tensors given = leaves(w.tensors, mask);
      const at::Tensor output = w.once(given);
      EXPECT_EQ(kept_bytes(between(w.once), given), bytes_of(output)) << w.name << " " << mask;
      EXPECT_EQ(kept_bytes(between(w.again), given), bytes_of(given[2]))
          << w.name << " " << mask << ": a copy of the bias";
      const at::Tensor cotangent = at::randn_like(output);
      expect_same(outcome_of(between(w.again), given, cotangent),
                  outcome_of(between(w.once), given, cotangent), 0, 0, w.name);
    }
  }
}

TEST(ProductsThatRunAgain, ReadTheWeightInBackward) {
  for (const Widening& w : widening()) {
    const Tensors given = leaves(w.tensors, kAll);
    const at::Tensor output = between(w.again)(given);
    output.sum().backward();
    EXPECT_THROW(output.sum().backward(), c10::Error) << w.name << ": a second time";
    const at::Tensor other = between(w.again)(given);
    {
      const at::NoGradGuard no_grad;
      given[1].mul_(2);
    }
    EXPECT_THROW(other.sum().backward(), c10::Error) << w.name << ": another weight";
  }
}

TEST(ProductsThatRunAgain, AreThoseWhoseOutputIsLarger) {
  const Tensors given = leaves({normal({8, 16}), normal({16, 16}), normal({16})}, kAll);
  const Widening linear = widening()[0];
  EXPECT_EQ(kept_bytes(between(linear.again), given), bytes_of(given[0]));
}

TEST(ProductsThatRunAgain, GiveThePartsOfASplit) {
  const auto gated = [](bool again) {
    return [=](const Tensors& t) {
      const auto halves = F::linear(F::silu(t[0]), t[1], t[2], true, again).chunk(2, -1);
      return F::mul(halves[0], F::silu(halves[1], false, true), true);
    };
  };
  const Tensors given = leaves({normal({8, 4}), normal({16, 4}), normal({16})}, kAll);
  EXPECT_EQ(kept_bytes(gated(true), given), bytes_of(given[2]));
  const at::Tensor cotangent = normal({8, 8});
  expect_same(outcome_of(gated(true), given, cotangent), outcome_of(gated(false), given, cotangent),
              0, 0, "gated");
}

TEST(Conv, BackwardOfFloat32UnderAutocastStaysFloat32AsInTorch) {
  const Weighted conv = weighted()[1];
  const Tensors given = leaves(conv.tensors, kInput);
  const at::Tensor output = conv.layer(given);
  const at::Tensor cotangent = at::randn_like(output);
  const at::Tensor want = outcome_of(conv.layer, given, cotangent).grads[0];
  const AutocastOn autocast(at::kBFloat16);
  expect_same(torch::autograd::grad({output}, {given[0]}, {cotangent})[0], want, 0, "input");
}

TEST(Linear, LeavesFloat64AloneUnderAutocastAsTorchDoes) {
  const auto linear = [](at::ScalarType input, at::ScalarType weight) {
    F::linear(normal({2, 5}, input), normal({3, 5}, weight), normal({3}));
  };
  const AutocastOn autocast(at::kBFloat16);
  EXPECT_THROW(linear(at::kDouble, at::kFloat), c10::Error);
  EXPECT_THROW(linear(at::kFloat, at::kDouble), c10::Error);
}

TEST(Linear, TypesMustMatchWithoutAutocast) {
  const Tensors tensors{normal({2, 5}, at::kDouble), normal({3, 5})};
  for (const unsigned mask : {0U, kInput}) {
    const Tensors given = leaves(tensors, mask);
    EXPECT_THROW(F::linear(given[0], given[1]), c10::Error);
  }
}

TEST(Conv, WrongArgumentsAreNamed) {
  const at::Tensor input = normal({2, 3, 6, 6});
  const at::Tensor weight = normal({3, 3, 3, 3});
  const std::vector<std::int64_t> three{1, 1, 1};
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
