#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <brim/nn/functional.h>

#include "nn/norm_support.h"
#include "nn/reference.h"
#include "tensors.h"

namespace brim::tests {
namespace {

namespace F = nn::functional;

constexpr std::int64_t kChannels = 6;
constexpr unsigned kInput = 1;
constexpr unsigned kWeight = 2;
constexpr unsigned kBias = 4;

struct Stats {
  at::Tensor mean = normal({kChannels});
  at::Tensor var = normal({kChannels}).square().add(0.3);
};

Layer batch_norm(const Stats& stats, bool training) {
  return [=](const Tensors& t) {
    return F::batch_norm(t[0], stats.mean, stats.var, t[1], t[2], training, 0.3);
  };
}

at::Tensor layer_norm(const Tensors& t) {
  return F::layer_norm(t[0], t[1].sizes(), t[1], option(t[2]));
}

at::Tensor group_norm(const Tensors& t) { return F::group_norm(t[0], 3, t[1], t[2]); }

at::Tensor rms_norm(const Tensors& t) { return F::rms_norm(t[0], t[1].sizes(), t[1]); }

at::Tensor float32_rms_norm(const Tensors& t) { return F::float32_rms_norm(t[0], t[1], 1e-5); }

Tensors with_weights(at::IntArrayRef sizes, std::int64_t features = kChannels) {
  return {normal(sizes), normal({features}), normal({features})};
}

/// Bytes kept for backward where nobody else holds the input.
std::int64_t kept_with_input(const Layer& layer, const Tensors& tensors) {
  return kept_bytes([&](const Tensors& t) { return layer({t[0].mul(2), t[1], t[2]}); }, tensors);
}

TEST(BatchNorm, KeepsTheInputOnlyWhereBackwardNeedsIt) {
  const Stats stats;
  const Tensors tensors = with_weights({8, kChannels, 16, 16});
  const auto input = static_cast<std::int64_t>(tensors[0].nbytes());
  const std::int64_t statistics = 2 * kChannels * 4;  // the batch's mean and deviation
  for (unsigned mask = 0; mask < 8; ++mask) {
    const Tensors given = leaves(tensors, mask);
    EXPECT_EQ(kept_with_input(batch_norm(stats, false), given), (mask & kWeight) != 0 ? input : 0)
        << mask;
    EXPECT_EQ(kept_with_input(batch_norm(stats, true), given),
              (mask & (kWeight | kInput)) != 0 ? input + statistics : 0)
        << mask;
  }
}

TEST(LayerNorm, KeepsTwoNumbersPerRowBesideItsInput) {
  for (unsigned mask = 1; mask < 8; ++mask) {
    EXPECT_EQ(kept_bytes(layer_norm, leaves(with_weights({64, 512}, 512), mask)),
              mask == kBias ? 0 : 2 * 64 * 4)
        << mask;
  }
}

TEST(GroupNorm, KeepsTwoNumbersPerGroupBesideItsInput) {
  for (unsigned mask = 1; mask < 8; ++mask) {
    EXPECT_EQ(kept_bytes(group_norm, leaves(with_weights({32, kChannels, 8, 8}), mask)),
              mask == kBias ? 0 : 2 * 32 * 3 * 4)
        << mask;
  }
}

TEST(RmsNorm, KeepsOneNumberPerRowBesideItsInputForTheInputsGradient) {
  for (unsigned mask = 1; mask < 4; ++mask) {
    EXPECT_EQ(kept_bytes(rms_norm, leaves(with_weights({64, 512}, 512), mask)),
              (mask & kInput) != 0 ? 64 * 4 : 0)
        << mask;
  }
}

TEST(Float32RmsNorm, KeepsItsInputInItsOwnTypeAndOneNumberPerRow) {
  const Tensors tensors{normal({64, 512}, at::kBFloat16), normal({512}, at::kBFloat16), {}};
  for (unsigned mask = 1; mask < 4; ++mask) {
    EXPECT_EQ(kept_with_input(float32_rms_norm, leaves(tensors, mask)),
              64 * 512 * 2 + ((mask & kInput) != 0 ? 64 * 4 : 0))
        << mask;
  }
}

/// As the frameworks write it.
at::Tensor by_hand(const at::Tensor& input, const MaybeTensor& weight, double offset,
                   bool cast_first) {
  const at::Tensor wide = input.to(at::kFloat);
  const at::Tensor scaled = wide.mul(wide.pow(2).mean(-1, true).add(1e-5).rsqrt());
  if (!weight) {
    return scaled.to(input.scalar_type());
  }
  return cast_first ? weight->mul(scaled.to(input.scalar_type()))
                    : scaled.mul(weight->to(at::kFloat).add(offset)).to(input.scalar_type());
}

TEST(Float32RmsNorm, EqualsTheNormsOfTheFrameworksBitForBit) {
  for (const at::ScalarType type : kFloatingTypes) {
    for (const at::ScalarType weights : kFloatingTypes) {
      const Tensors tensors = leaves({normal({5, 3, 20}, type), normal({20}, weights)}, 3);
      for (const bool cast_first : {false, true}) {
        const Layer theirs = [=](const Tensors& t) {
          return by_hand(t[0], t[1], cast_first ? 0 : 1, cast_first);
        };
        const Layer ours = [=](const Tensors& t) {
          return F::float32_rms_norm(t[0], t[1], 1e-5, cast_first ? 0 : 1, cast_first);
        };
        const at::Tensor cotangent = at::randn_like(theirs(tensors));
        expect_same(outcome_of(ours, tensors, cotangent), outcome_of(theirs, tensors, cotangent), 0,
                    0, std::string(c10::toString(type)) + " " + c10::toString(weights));
      }
      EXPECT_TRUE(
          F::float32_rms_norm(tensors[0], {}, 1e-5).equal(by_hand(tensors[0], {}, 0, true)));
    }
  }
}

TEST(Float32RmsNorm, RefusesWhatDoesNotFit) {
  EXPECT_CONTAINS(
      message_of<c10::ValueError>([] { F::float32_rms_norm(normal({4, 7}), normal({6}), 0); }),
      "weight");
  EXPECT_CONTAINS(message_of<c10::ValueError>([] { F::float32_rms_norm(normal({4, 7}), {}, -1); }),
                  "eps must be 0 or more, got -1");
  EXPECT_CONTAINS(message_of<c10::ValueError>([] { F::float32_rms_norm(normal({}), {}, 0); }),
                  "input must have at least one dimension");
}

/// The norms as autocast calls them: the input comes in low precision, the weights in float32.
const std::vector<std::pair<std::string, Layer>>& in_float32() {
  using LayerOp = at::Tensor(const at::Tensor&, at::IntArrayRef, const MaybeTensor&,
                             const MaybeTensor&, double, bool);
  using GroupOp = at::Tensor(const at::Tensor&, std::int64_t, const MaybeTensor&,
                             const MaybeTensor&, double, bool);
  using RmsOp = at::Tensor(const at::Tensor&, at::IntArrayRef, const MaybeTensor&,
                           std::optional<double>, bool);
  static const std::vector<std::pair<std::string, Layer>> all{
      {"layer_norm",
       [](const Tensors& t) {
         return operator_named<LayerOp>("brim::layer_norm")
             .call(t[0], {16}, t[1], t[2], 1e-5, t[0].scalar_type() != at::kFloat);
       }},
      {"group_norm",
       [](const Tensors& t) {
         return operator_named<GroupOp>("brim::group_norm")
             .call(t[0], 4, t[1], t[2], 1e-5, t[0].scalar_type() != at::kFloat);
       }},
      {"rms_norm", [](const Tensors& t) {
         return operator_named<RmsOp>("brim::rms_norm")
             .call(t[0], {16}, t[1], 1e-5, t[0].scalar_type() != at::kFloat);
       }}};
  return all;
}

TEST(Norms, InFloat32KeepALowPrecisionInputAsItIs) {
  const Tensors low{normal({64, 16, 16}, at::kBFloat16), normal({16}), normal({16})};
  const auto input = static_cast<std::int64_t>(low[0].nbytes());
  for (const auto& [name, layer] : in_float32()) {
    const Layer cast_before = [&](const Tensors& t) {
      return layer({t[0].to(at::kFloat), t[1], t[2]});
    };
    const unsigned bias = name == "rms_norm" ? 0 : kBias;
    const Tensors tensors = leaves(low, kInput | kWeight | bias);
    const at::Tensor cotangent = normal({64, 16, 16});
    expect_same(outcome_of(layer, tensors, cotangent), outcome_of(cast_before, tensors, cotangent),
                0, 0, name);
    EXPECT_EQ(kept_with_input(cast_before, tensors) - kept_with_input(layer, tensors), input)
        << name;
    const Layer of_part = [&](const Tensors& t) {
      return layer({t[0].mul(2).narrow(0, 0, 4), t[1], t[2]});
    };
    EXPECT_LT(kept_bytes(of_part, tensors), 4 * 16 * 16 * 4) << name;
  }
}

TEST(Norms, GiveTheirOutputAgain) {
  const Tensors images = with_weights({2, kChannels, 3, 4});
  const Tensors last{images[0].contiguous(at::MemoryFormat::ChannelsLast), images[1], images[2]};
  for (const Tensors& tensors : {images, last}) {
    expect_recomputes(batch_norm({}, true), leaves(tensors, kInput), false);
    expect_recomputes(batch_norm({}, false), leaves(tensors, kWeight), false, 2 * kChannels * 4);
    expect_recomputes(group_norm, leaves(tensors, kInput), false);
  }
  const Tensors rows = with_weights({4, 7}, 7);
  expect_recomputes(layer_norm, leaves(rows, kInput), true);
  expect_recomputes(rms_norm, leaves({rows[0], rows[1]}, kInput), true);
  expect_recomputes(float32_rms_norm, leaves({rows[0], rows[1]}, kInput), true);
}

TEST(BatchNorm, GivingItsOutputAgainLeavesTheStatistics) {
  const Stats stats;
  const at::Tensor weight = normal({3, kChannels}).set_requires_grad(true);
  const Tensors tensors = leaves(with_weights({4, kChannels}), kInput);
  const at::Tensor output = F::linear(batch_norm(stats, true)(tensors), weight, {}, true);
  const Stats after{stats.mean.clone(), stats.var.clone()};
  torch::autograd::grad({output}, {weight}, {output.detach()});
  EXPECT_TRUE(stats.mean.equal(after.mean));
  EXPECT_TRUE(stats.var.equal(after.var));
}

TEST(BatchNorm, IsNotAskedAgainWhereItKeepsNoInput) {
  const Tensors tensors = leaves(with_weights({4, kChannels}), kInput | kBias);
  const Layer layer = batch_norm({}, false);
  const Behind kept = behind(layer, tensors, false, false);
  const Behind asked = behind(layer, tensors, true, false);
  EXPECT_EQ(asked.kept, kept.kept);
  EXPECT_TRUE(asked.weight_grad.equal(kept.weight_grad));
}

TEST(BatchNorm, RefusesWhatTorchRefuses) {
  const Stats stats;
  const at::Tensor input = normal({4, kChannels});
  EXPECT_CONTAINS(message_of<c10::ValueError>([&] {
                    F::batch_norm(normal({1, kChannels}), stats.mean, stats.var, {}, {}, true);
                  }),
                  "more than 1 value per channel");
  EXPECT_NO_THROW(F::batch_norm(normal({1, kChannels}), stats.mean, stats.var));
  EXPECT_THROW(F::batch_norm(normal({4, 3}), stats.mean, stats.var), c10::Error);
  EXPECT_THROW(F::batch_norm(input, stats.mean, {}), c10::Error);
  EXPECT_THROW(F::batch_norm(input, {}, stats.var), c10::Error);
  EXPECT_THROW(F::batch_norm(input, {}, {}), c10::Error);
  EXPECT_THROW(F::batch_norm(normal({kChannels}), stats.mean, stats.var), c10::Error);
  EXPECT_THROW(F::batch_norm(input.to(at::kInt), stats.mean, stats.var), c10::Error);
}

TEST(LayerNorm, RefusesWhatTorchRefuses) {
  EXPECT_THROW(F::layer_norm(normal({4, 7}), {6}), c10::Error);
  EXPECT_THROW(F::layer_norm(normal({4, 7}), {7}, normal({6})), c10::Error);
  EXPECT_THROW(F::layer_norm(normal({4, 7}).to(at::kLong), {7}), c10::Error);
}

TEST(GroupNorm, RefusesWhatTorchRefuses) {
  const at::Tensor input = normal({4, kChannels});
  EXPECT_THROW(F::group_norm(input, 4), c10::Error);
  EXPECT_CONTAINS(message_of<c10::ValueError>([&] { F::group_norm(input, 0); }), "num_groups");
  EXPECT_CONTAINS(
      message_of<c10::ValueError>([&] { F::group_norm(normal({1, kChannels}), kChannels); }),
      "more than 1 value");
  EXPECT_THROW(F::group_norm(normal({kChannels}), 2), c10::Error);
  EXPECT_THROW(F::group_norm(input, 2, normal({5})), c10::Error);
  EXPECT_THROW(F::group_norm(input, 2, {}, normal({5})), c10::Error);
}

TEST(RmsNorm, RefusesWhatTorchRefuses) {
  EXPECT_CONTAINS(message_of<c10::Error>([] { F::rms_norm(normal({4, 7}), {6}); }),
                  "normalized_shape");
  EXPECT_THROW(F::rms_norm(normal({4, 7}), {}), c10::Error);
  EXPECT_THROW(F::rms_norm(normal({7}), {4, 7}), c10::Error);
  EXPECT_CONTAINS(message_of<c10::Error>([] { F::rms_norm(normal({4, 7}), {7}, normal({6})); }),
                  "weight");
}

TEST(RmsNorm, KernelComputesOnlyWhatIsAskedFor) {
  using Op =
      std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                         const MaybeTensor&, std::int64_t, bool, bool);
  const auto op = operator_named<Op>("brim::rms_norm_backward");
  const at::Tensor input = normal({5, 3, 20});
  const at::Tensor grad = normal({5, 3, 20});
  const at::Tensor weight = normal({3, 20});
  const at::Tensor rstd = normal({5, 1, 1}).abs();
  const at::Tensor hat = input.mul(rstd);
  const at::Tensor along = grad.mul(weight).mul(hat).mean({1, 2}, true);
  const at::Tensor input_grad = grad.mul(weight).sub(hat.mul(along)).mul(rstd);
  const at::Tensor weight_grad = grad.mul(hat).sum(0);
  for (const bool wants_input : {false, true}) {
    for (const bool wants_weight : {false, true}) {
      const auto got = op.call(grad, input, rstd, weight, 2, wants_input, wants_weight);
      expect_same(std::get<0>(got), wants_input ? input_grad : at::Tensor(), 1e-5, "input");
      expect_same(std::get<1>(got), wants_weight ? weight_grad : at::Tensor(), 1e-5, "weight");
    }
  }
}

TEST(RmsNorm, GradientsOfManyRowsAreAsExactAsTorchs) {
  // Against float64: rows for several threads, a size that is no multiple of a block.
  const Tensors start{normal({700, 301}), normal({301})};
  const at::Tensor cotangent = normal({700, 301});
  const Tensors wide{start[0].to(at::kDouble), start[1].to(at::kDouble)};
  const Outcome got = outcome_of(rms_norm, leaves(start, 3), cotangent);
  const Outcome exact = outcome_of(rms_norm, leaves(wide, 3), cotangent.to(at::kDouble));
  for (std::size_t i = 0; i < 2; ++i) {
    expect_same(got.grads[i].to(at::kDouble), exact.grads[i], 1e-6, std::to_string(i));
  }
}

const auto& scale_channels() {
  static const auto op =
      operator_named<at::Tensor(const at::Tensor&, const MaybeTensor&, const at::Tensor&, double)>(
          "brim::scale_channels");
  return op;
}

TEST(ScaleChannels, EqualsTorchsBackwardOnLargeTensors) {
  constexpr double kEps = 1e-4;
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const at::Tensor plain = normal({4, 96, 31, 33}, type);
    for (const at::Tensor& grad : {plain, plain.contiguous(at::MemoryFormat::ChannelsLast)}) {
      const at::Tensor weight = normal({96}, type);
      const at::Tensor var = normal({96}).abs().to(type);
      const at::Tensor want = std::get<0>(at::native_batch_norm_backward(
          grad, grad, weight, at::zeros_like(var), var, {}, {}, false, kEps, {true, false, false}));
      const at::Tensor got = scale_channels().call(grad, weight, var, kEps);
      EXPECT_TRUE(got.equal(want)) << type << grad.strides();
      EXPECT_EQ(got.strides(), grad.strides());
    }
  }
}

TEST(ScaleChannels, TakesExpandedAndEmptyGradients) {
  const at::Tensor var = at::ones({kChannels});
  const at::Tensor expanded = at::ones({}).expand({2, kChannels, 3});
  EXPECT_TRUE(scale_channels().call(expanded, {}, var, 0).equal(at::ones({2, kChannels, 3})));
  EXPECT_EQ(scale_channels().call(at::zeros({0, kChannels, 3}), {}, var, 0).sizes(),
            at::IntArrayRef({0, kChannels, 3}));
}

}  // namespace
}  // namespace brim::tests
