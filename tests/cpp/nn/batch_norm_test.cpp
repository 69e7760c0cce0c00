#include <ATen/ops/batch_norm.h>
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

constexpr std::int64_t kChannels = 5;
constexpr double kMomentum = 0.3;
constexpr double kEps = 1e-4;

struct Stats {
  at::Tensor mean;
  at::Tensor var;
};

Stats random_stats(at::ScalarType type) {
  return {normal({kChannels}, type), normal({kChannels}).square().add(0.3).to(type)};
}

Layer torch_layer(const Stats& stats, bool training) {
  return [=](const Tensors& t) {
    return at::batch_norm(t[0], option(t[1]), option(t[2]), option(stats.mean), option(stats.var),
                          training, kMomentum, kEps, true);
  };
}

Layer brim_layer(const Stats& stats, bool training) {
  return [=](const Tensors& t) {
    return F::batch_norm(t[0], option(stats.mean), option(stats.var), option(t[1]), option(t[2]),
                         training, kMomentum, kEps);
  };
}

const std::vector<std::vector<std::int64_t>>& shapes() {
  static const std::vector<std::vector<std::int64_t>> kShapes{
      {6, kChannels}, {4, kChannels, 7}, {3, kChannels, 4, 6}, {2, kChannels, 3, 4, 3}};
  return kShapes;
}

/// The input in each memory format that it can have.
std::vector<at::Tensor> in_formats(const at::Tensor& tensor) {
  std::vector<at::Tensor> result{tensor};
  if (tensor.dim() == 4) {
    result.push_back(tensor.contiguous(at::MemoryFormat::ChannelsLast));
  } else if (tensor.dim() == 5) {
    result.push_back(tensor.contiguous(at::MemoryFormat::ChannelsLast3d));
  }
  return result;
}

struct Types {
  at::ScalarType input;
  at::ScalarType weights;
};

constexpr Types kTypes[] = {{at::kFloat, at::kFloat},       {at::kDouble, at::kDouble},
                            {at::kBFloat16, at::kBFloat16}, {at::kHalf, at::kHalf},
                            {at::kBFloat16, at::kFloat},    {at::kHalf, at::kFloat}};

TEST(BatchNorm, EqualsTorchForEveryMixOfFrozenTensors) {
  for (const Types types : kTypes) {
    for (const auto& shape : shapes()) {
      for (const at::Tensor& input : in_formats(normal(shape, types.input))) {
        for (unsigned mask = 0; mask < 8; ++mask) {
          for (const bool training : {false, true}) {
            const Tensors tensors = leaves(
                {input, normal({kChannels}, types.weights), normal({kChannels}, types.weights)},
                mask);
            const Stats ours = random_stats(types.weights);
            const Stats theirs{ours.mean.clone(), ours.var.clone()};
            const at::Tensor cotangent = at::randn_like(input);
            const Outcome got = outcome_of(brim_layer(ours, training), tensors, cotangent);
            const Outcome want = outcome_of(torch_layer(theirs, training), tensors, cotangent);
            const std::string what = c10::str(types.input, " ", types.weights, " ", shape, " ",
                                              input.strides(), " mask ", mask, " ", training);
            expect_same(got.output, want.output, 0, what);
            expect_same(got.grads[0], want.grads[0], 0, what + ", input");
            expect_same(got.grads[1], want.grads[1], 0, what + ", weight");
            // Without the input the bias' gradient is a plain sum, in another order.
            expect_same(got.grads[2], want.grads[2], rounding(types.weights), what + ", bias");
            expect_same(ours.mean, theirs.mean, 0, what + ", running mean");
            expect_same(ours.var, theirs.var, 0, what + ", running variance");
          }
        }
      }
    }
  }
}

TEST(BatchNorm, WorksWithoutWeightsAndWithoutStatistics) {
  for (const bool with_stats : {false, true}) {
    const Tensors tensors = leaves({normal({4, kChannels, 3}), {}, {}}, 1);
    const Stats stats = with_stats ? random_stats(at::kFloat) : Stats{};
    const at::Tensor cotangent = normal({4, kChannels, 3});
    for (const bool training : {false, true}) {
      if (!training && !with_stats) {
        EXPECT_THROW(brim_layer(stats, training)(tensors), c10::Error);
        continue;
      }
      const Stats theirs = with_stats ? Stats{stats.mean.clone(), stats.var.clone()} : Stats{};
      const Outcome want = outcome_of(torch_layer(theirs, training), tensors, cotangent);
      expect_same(outcome_of(brim_layer(stats, training), tensors, cotangent), want, 0, 0, "");
    }
  }
}

/// Bytes kept for backward where nobody else holds the input.
std::int64_t kept_with_input(const Layer& layer, unsigned mask) {
  const Tensors start =
      leaves({normal({kChannels, 1, 1}), normal({kChannels}), normal({kChannels})}, mask);
  const at::Tensor data = normal({8, kChannels, 16, 16});
  const PeakMeter meter(at::kCPU);
  const at::Tensor output = layer({data.add(start[0]), start[1], start[2]});
  return meter.left() - static_cast<std::int64_t>(output.storage().nbytes());
}

TEST(BatchNorm, KeepsTheInputOnlyWhereBackwardNeedsIt) {
  const std::int64_t input = std::int64_t{8} * kChannels * 16 * 16 * 4;
  const std::int64_t statistics = 2 * kChannels * 4;  // the batch's mean and deviation
  const Stats stats = random_stats(at::kFloat);
  for (unsigned mask = 0; mask < 8; ++mask) {
    const bool weight_trains = (mask & 2U) != 0;
    const bool input_trains = (mask & 1U) != 0;
    EXPECT_EQ(kept_with_input(brim_layer(stats, false), mask), weight_trains ? input : 0) << mask;
    EXPECT_EQ(kept_with_input(brim_layer(stats, true), mask),
              weight_trains || input_trains ? input + statistics : 0)
        << mask;
    // Never more than torch.
    for (const bool training : {false, true}) {
      EXPECT_LE(kept_with_input(brim_layer(stats, training), mask),
                kept_with_input(torch_layer(stats, training), mask))
          << mask;
    }
  }
}

TEST(BatchNorm, GivesItsOutputAgain) {
  for (const bool training : {false, true}) {
    for (const auto& shape : shapes()) {
      for (const at::Tensor& input : in_formats(normal(shape))) {
        const Tensors tensors =
            leaves({input, normal({kChannels}), normal({kChannels})}, training ? 1 : 2);
        expect_recomputes(brim_layer(random_stats(at::kFloat), training), tensors, false,
                          training ? 0 : 2 * kChannels * 4);
      }
    }
  }
}

TEST(BatchNorm, GivingItsOutputAgainLeavesTheStatistics) {
  const Stats stats = random_stats(at::kFloat);
  const Tensors tensors =
      leaves({normal({4, kChannels}), normal({kChannels}), normal({kChannels})}, 1);
  const at::Tensor weight = normal({3, kChannels}).set_requires_grad(true);
  const at::Tensor output = F::linear(brim_layer(stats, true)(tensors), weight, {}, true);
  const Stats after{stats.mean.clone(), stats.var.clone()};
  torch::autograd::grad({output}, {weight}, {output.detach()});
  EXPECT_TRUE(stats.mean.equal(after.mean));
  EXPECT_TRUE(stats.var.equal(after.var));
}

TEST(BatchNorm, IsNotAskedAgainWhereItKeepsNoInput) {
  const Tensors tensors =
      leaves({normal({4, kChannels}), normal({kChannels}), normal({kChannels})}, 0b101);
  const Layer layer = brim_layer(random_stats(at::kFloat), false);
  const Behind kept = behind(layer, tensors, false, false);
  const Behind asked = behind(layer, tensors, true, false);
  EXPECT_EQ(asked.kept, kept.kept);
  EXPECT_TRUE(asked.weight_grad.equal(kept.weight_grad));
}

TEST(BatchNorm, DifferentiatesTwice) {
  for (const bool training : {false, true}) {
    for (unsigned mask = 1; mask < 8; ++mask) {
      const Stats stats = random_stats(at::kDouble);
      const Tensors tensors =
          leaves({normal({3, kChannels, 4}, at::kDouble), normal({kChannels}, at::kDouble),
                  normal({kChannels}, at::kDouble)},
                 mask);
      expect_same_second_grads(brim_layer(stats, training), torch_layer(stats, training), tensors,
                               normal({3, kChannels, 4}, at::kDouble),
                               c10::str(training, " mask ", mask));
    }
  }
}

TEST(BatchNorm, UndefinedGradientGivesNone) {
  const Tensors tensors =
      leaves({normal({4, kChannels}), normal({kChannels}), normal({kChannels})}, 7);
  for (const bool training : {false, true}) {
    const at::Tensor output = brim_layer(random_stats(at::kFloat), training)(tensors);
    expect_none_from_none(output);
  }
}

TEST(BatchNorm, RefusesWhatTorchRefuses) {
  const Stats stats = random_stats(at::kFloat);
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
  EXPECT_THROW(F::batch_norm(input.to(at::kComplexFloat), stats.mean, stats.var), c10::Error);
}

const auto& scale_channels() {
  static const auto op =
      operator_named<at::Tensor(const at::Tensor&, const MaybeTensor&, const at::Tensor&, double)>(
          "brim::scale_channels");
  return op;
}

TEST(ScaleChannels, EqualsTorchsBackwardOnLargeTensors) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (const at::Tensor& grad : in_formats(normal({4, 96, 31, 33}, type))) {
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
