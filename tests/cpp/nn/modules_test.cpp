#include <ATen/ops/hardsigmoid.h>
#include <ATen/ops/hardswish.h>
#include <brim/memory/peak_meter.h>
#include <brim/nn/modules.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/serialize.h>

#include <cstdint>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace brim::nn {
namespace {

using at::Tensor;

/// What `from` saves, `to` loads.
template <class From, class To>
void carry_over(const From& from, To& to) {
  std::stringstream stream;
  torch::save(from, stream);
  torch::load(to, stream);
}

template <class Holder>
void freeze(Holder& layer, bool weight, bool bias) {
  for (auto& parameter : layer->named_parameters()) {
    parameter.value().set_requires_grad(!(parameter.key() == "bias" ? bias : weight));
    parameter.value().mutable_grad() = Tensor();
  }
}

struct Rounding {
  double relative = 0;
  double absolute = 0;
};

void expect_same(const Tensor& ours, const Tensor& theirs, Rounding rounding,
                 const std::string& what) {
  ASSERT_EQ(ours.defined(), theirs.defined()) << what;
  if (ours.defined()) {
    EXPECT_TRUE(at::allclose(ours, theirs, rounding.relative, rounding.absolute))
        << what << " is off by " << (ours - theirs).abs().max().item<double>();
  }
}

/// Values and gradients of both for one random cotangent, in every pattern of frozen parameters.
template <class Theirs, class Ours>
void expect_like(Theirs theirs, Ours ours, const Tensor& input, Rounding rounding = {}) {
  carry_over(theirs, ours);
  for (const auto& [weight, bias] :
       std::vector<std::pair<bool, bool>>{{false, false}, {true, false}, {true, true}}) {
    freeze(theirs, weight, bias);
    freeze(ours, weight, bias);
    const Tensor x = input.detach().clone().requires_grad_();
    const Tensor y = input.detach().clone().requires_grad_();
    torch::manual_seed(7);  // dropout
    const Tensor expected = theirs->forward(x);
    torch::manual_seed(7);
    const Tensor value = ours->forward(y);
    expect_same(value, expected, rounding, "output");
    const Tensor cotangent = at::randn_like(expected);
    expected.backward(cotangent);
    value.backward(cotangent);
    expect_same(y.grad(), x.grad(), rounding, "input's gradient");
    const auto parameters = theirs->named_parameters();
    for (const auto& parameter : ours->named_parameters()) {
      expect_same(parameter.value().grad(), parameters[parameter.key()].grad(), rounding,
                  parameter.key());
    }
    const auto buffers = theirs->named_buffers();
    for (const auto& buffer : ours->named_buffers()) {
      expect_same(buffer.value(), buffers[buffer.key()], rounding, buffer.key());
    }
  }
}

// The same sums in another order.
constexpr Rounding kSums{1e-5, 3e-5};

Tensor images() { return at::randn({2, 4, 9, 10}); }

// -- Convolutions ------------------------------------------------------------------------------

TEST(ConvModules, ValuesAndGradientsAreThoseOfTorchInEveryDimension) {
  expect_like(torch::nn::Conv1d(4, 6, 3), Conv1d(4, 6, 3), at::randn({2, 4, 9}), kSums);
  expect_like(torch::nn::Conv2d(4, 6, 3), Conv2d(4, 6, 3), images(), kSums);
  expect_like(torch::nn::Conv3d(4, 6, 3), Conv3d(4, 6, 3), at::randn({2, 4, 5, 6, 7}), kSums);
  expect_like(torch::nn::ConvTranspose1d(4, 6, 3), ConvTranspose1d(4, 6, 3), at::randn({2, 4, 9}),
              kSums);
  expect_like(torch::nn::ConvTranspose2d(4, 6, 3), ConvTranspose2d(4, 6, 3), images(), kSums);
  expect_like(torch::nn::ConvTranspose3d(4, 6, 3), ConvTranspose3d(4, 6, 3),
              at::randn({2, 4, 3, 4, 5}), kSums);
}

TEST(ConvModules, EveryOptionIsHonoured) {
  const auto options = torch::nn::Conv2dOptions(4, 6, {3, 2}).stride({2, 1}).padding({1, 0});
  const std::vector<torch::nn::Conv2dOptions> all{
      torch::nn::Conv2dOptions(options).dilation(2).groups(2),
      torch::nn::Conv2dOptions(options).bias(false),
      torch::nn::Conv2dOptions(options).padding_mode(torch::kReflect),
      torch::nn::Conv2dOptions(options).padding_mode(torch::kReplicate),
      torch::nn::Conv2dOptions(options).padding_mode(torch::kCircular),
      torch::nn::Conv2dOptions(4, 6, 3).padding(torch::kSame).dilation({2, 1}),
      torch::nn::Conv2dOptions(4, 6, {2, 4}).padding(torch::kSame),  // more at the end
      torch::nn::Conv2dOptions(4, 6, 3).padding(torch::kSame).padding_mode(torch::kReflect),
      torch::nn::Conv2dOptions(4, 6, 3).padding(torch::kValid),
  };
  for (const auto& each : all) {
    expect_like(torch::nn::Conv2d(each), Conv2d(each), images(), kSums);
  }
  expect_like(torch::nn::Conv2d(options), Conv2d(options), at::randn({4, 9, 10}),
              kSums);  // no batch
}

TEST(ConvModules, TransposedReachesTheOutputSizeAskedFor) {
  const auto options = torch::nn::ConvTranspose2dOptions(4, 3, 3).stride(3).padding(1);
  torch::nn::ConvTranspose2d theirs(options);
  ConvTranspose2d ours(options);
  carry_over(theirs, ours);
  const Tensor input = images();
  for (const std::vector<std::int64_t>& size :
       {std::vector<std::int64_t>{25, 28}, std::vector<std::int64_t>{27, 29},
        std::vector<std::int64_t>{2, 3, 26, 30}}) {
    const at::IntArrayRef wanted(size);
    EXPECT_TRUE(ours->forward(input, wanted).equal(theirs->forward(input, wanted)));
  }
  const std::vector<std::int64_t> large{25, 31};
  EXPECT_THROW(ours->forward(input, at::IntArrayRef(large)), c10::ValueError);
  const std::vector<std::int64_t> one{25};
  EXPECT_THROW(ours->forward(input, at::IntArrayRef(one)), c10::ValueError);

  ConvTranspose2d dilated(torch::nn::ConvTranspose2dOptions(4, 3, 3).stride(2).dilation(2));
  const std::vector<std::int64_t> asked{22, 23};
  EXPECT_EQ(dilated->forward(input, at::IntArrayRef(asked)).sizes().slice(2),
            at::IntArrayRef(asked))
      << "torch::nn leaves the dilation out of its sum";
}

TEST(ConvModules, FrozenConvolutionKeepsNoInput) {
  const Tensor input = at::randn({8, 16, 32, 32}).requires_grad_();
  auto options = torch::nn::Conv2dOptions(16, 16, 3).padding(1);
  const auto left = [&](auto layer) {
    const Tensor x = input * 2;  // an intermediate value: what keeps it pays for it
    freeze(layer, true, true);
    const PeakMeter meter(at::kCPU);
    Tensor between = x * 2;
    const Tensor y = layer->forward(between);
    between.reset();
    return meter.left();
  };
  const auto bytes = static_cast<std::int64_t>(input.nbytes());
  EXPECT_GE(left(torch::nn::Conv2d(options)), 2 * bytes) << "output and input";
  EXPECT_LT(left(Conv2d(options)), 3 * bytes / 2) << "output";
  EXPECT_LT(left(Conv2d(options.padding_mode(torch::kReflect))), 3 * bytes / 2)
      << "padding needs the form of its input only";
}

// -- Linear, normalisation ---------------------------------------------------------------------

TEST(LinearModule, ValuesAndGradientsAreThoseOfTorch) {
  expect_like(torch::nn::Linear(5, 3), Linear(5, 3), at::randn({4, 5}));
  expect_like(torch::nn::Linear(5, 3), Linear(5, 3), at::randn({2, 4, 5}));
  expect_like(torch::nn::Linear(5, 3), Linear(5, 3), at::randn({5}));
  const auto options = torch::nn::LinearOptions(5, 3).bias(false);
  expect_like(torch::nn::Linear(options), Linear(options), at::randn({4, 5}));
}

constexpr Rounding kNorm{1e-5, 1e-6};

TEST(BatchNormModules, TrainingAndEvaluationAreThoseOfTorchInEveryDimension) {
  const auto both_modes = [](auto theirs, auto ours, const Tensor& input) {
    expect_like(theirs, ours, input, kNorm);
    theirs->eval();
    ours->eval();
    expect_like(theirs, ours, input, kNorm);
  };
  both_modes(torch::nn::BatchNorm1d(4), BatchNorm1d(4), at::randn({3, 4}));
  both_modes(torch::nn::BatchNorm1d(4), BatchNorm1d(4), at::randn({3, 4, 5}));
  both_modes(torch::nn::BatchNorm2d(4), BatchNorm2d(4), images());
  both_modes(torch::nn::BatchNorm3d(4), BatchNorm3d(4), at::randn({2, 4, 2, 3, 4}));
  const auto plain = torch::nn::BatchNormOptions(4).affine(false);
  both_modes(torch::nn::BatchNorm2d(plain), BatchNorm2d(plain), images());
  const auto stateless = torch::nn::BatchNormOptions(4).track_running_stats(false);
  both_modes(torch::nn::BatchNorm2d(stateless), BatchNorm2d(stateless), images());
}

TEST(BatchNormModules, WithoutMomentumTheStatisticsAreTheMeanOverBatches) {
  const auto options = torch::nn::BatchNormOptions(4).momentum(std::nullopt);
  const torch::nn::BatchNorm2d theirs(options);
  const BatchNorm2d ours(options);
  for (int i = 0; i < 3; ++i) {
    const Tensor input = images();
    torch::nn::BatchNorm2d(theirs)->forward(input);
    BatchNorm2d(ours)->forward(input);
  }
  EXPECT_EQ(ours->num_batches_tracked.item<std::int64_t>(), 3);
  expect_same(ours->running_mean, theirs->running_mean, kNorm, "mean");
  expect_same(ours->running_var, theirs->running_var, kNorm, "variance");
}

TEST(BatchNormModules, WrongInputsAreRefusedAsTorchDoes) {
  EXPECT_THROW(BatchNorm2d(4)->forward(at::randn({3, 4})), c10::Error);
  EXPECT_THROW(BatchNorm1d(4)->forward(at::randn({1, 4})), c10::Error) << "one value a channel";
}

TEST(NormModules, LayerAndGroupNormAreThoseOfTorch) {
  expect_like(torch::nn::LayerNorm(std::vector<std::int64_t>{9, 10}),
              LayerNorm(std::vector<std::int64_t>{9, 10}), images(), kNorm);
  const auto plain = torch::nn::LayerNormOptions({10}).elementwise_affine(false).eps(1e-3);
  expect_like(torch::nn::LayerNorm(plain), LayerNorm(plain), images(), kNorm);
  expect_like(torch::nn::GroupNorm(2, 4), GroupNorm(2, 4), images(), kNorm);
}

TEST(NormModules, RmsNormIsItsFormula) {
  RMSNorm norm(RMSNormOptions({10}).eps(1e-3));
  {
    const torch::NoGradGuard no_grad;
    norm->weight.uniform_(0.5, 2);
  }
  const Tensor x = at::randn({3, 10}).requires_grad_();
  const Tensor y = x.detach().clone().requires_grad_();
  const Tensor weight = norm->weight.detach().clone().requires_grad_();
  const Tensor expected = y * at::rsqrt(y.pow(2).mean(-1, true) + 1e-3) * weight;
  const Tensor value = norm->forward(x);
  expect_same(value, expected, kNorm, "output");
  const Tensor cotangent = at::randn_like(value);
  value.backward(cotangent);
  expected.backward(cotangent);
  expect_same(x.grad(), y.grad(), kNorm, "input's gradient");
  expect_same(norm->weight.grad(), weight.grad(), kNorm, "weight's gradient");
}

TEST(NormModules, RmsNormHasTheOptionsAndTheStateOfPythons) {
  EXPECT_EQ(RMSNorm(RMSNormOptions({3, 4}))->named_parameters().keys(),
            std::vector<std::string>{"weight"});
  EXPECT_TRUE(
      RMSNorm(RMSNormOptions({3}).elementwise_affine(false))->named_parameters().is_empty());
  EXPECT_THROW(RMSNorm(RMSNormOptions({})), c10::ValueError);
  EXPECT_THROW(RMSNorm(RMSNormOptions({3, 0})), c10::ValueError);
  RMSNorm norm(RMSNormOptions({4}));
  const auto copy = std::dynamic_pointer_cast<RMSNormImpl>(norm->clone());
  ASSERT_TRUE(copy);
  EXPECT_TRUE(copy->weight.equal(norm->weight));
  EXPECT_FALSE(copy->weight.is_same(norm->weight));
  std::ostringstream text;
  text << *norm;
  EXPECT_EQ(text.str(), "brim::nn::RMSNorm([4], eps=None, elementwise_affine=true)");
}

// -- Activations, dropout, pooling -------------------------------------------------------------

TEST(ActivationModules, ValuesAndGradientsAreThoseOfTorch) {
  const Tensor input = at::randn({3, 50}) * 4;
  expect_like(torch::nn::ReLU(), ReLU(), input);
  expect_like(torch::nn::ReLU6(), ReLU6(), input);
  expect_like(torch::nn::LeakyReLU(torch::nn::LeakyReLUOptions().negative_slope(0.3)),
              LeakyReLU(torch::nn::LeakyReLUOptions().negative_slope(0.3)), input);
  expect_like(torch::nn::Hardtanh(torch::nn::HardtanhOptions().min_val(-2).max_val(3)),
              Hardtanh(torch::nn::HardtanhOptions().min_val(-2).max_val(3)), input);
  expect_like(torch::nn::GELU(), GELU(), input);
  expect_like(torch::nn::GELU(torch::nn::GELUOptions().approximate("tanh")),
              GELU(torch::nn::GELUOptions().approximate("tanh")), input);
  expect_like(torch::nn::SiLU(), SiLU(), input);
  expect_like(torch::nn::ELU(torch::nn::ELUOptions().alpha(0.5)),
              ELU(torch::nn::ELUOptions().alpha(0.5)), input);
  expect_like(torch::nn::CELU(torch::nn::CELUOptions().alpha(0.3)),
              CELU(torch::nn::CELUOptions().alpha(0.3)), input);
  expect_like(torch::nn::SELU(), SELU(), input);
  expect_like(torch::nn::LogSigmoid(), LogSigmoid(), input);
  expect_like(torch::nn::Softsign(), Softsign(), input);
  expect_like(torch::nn::Threshold(torch::nn::ThresholdOptions(0.3, -2)),
              Threshold(torch::nn::ThresholdOptions(0.3, -2)), input);
  expect_like(torch::nn::Softplus(torch::nn::SoftplusOptions().beta(2)),
              Softplus(torch::nn::SoftplusOptions().beta(2)), input);
  expect_like(torch::nn::Sigmoid(), Sigmoid(), input);
  expect_like(torch::nn::Tanh(), Tanh(), input);
  expect_like(torch::nn::PReLU(), PReLU(), input);
  EXPECT_TRUE(Hardswish()->forward(input).equal(at::hardswish(input)));
  EXPECT_TRUE(Hardsigmoid()->forward(input).equal(at::hardsigmoid(input)));
}

TEST(ActivationModules, InPlaceWritesIntoTheInput) {
  const auto written = [](auto layer) {
    Tensor x = at::randn({30}) * 4;
    const Tensor before = x.clone();
    const Tensor y = layer->forward(x);
    return y.is_same(x) && !x.equal(before);
  };
  EXPECT_TRUE(written(ReLU(torch::nn::ReLUOptions(true))));
  EXPECT_TRUE(written(ReLU6(torch::nn::ReLU6Options(true))));
  EXPECT_TRUE(written(LeakyReLU(torch::nn::LeakyReLUOptions().inplace(true))));
  EXPECT_TRUE(written(Hardtanh(torch::nn::HardtanhOptions().inplace(true))));
  EXPECT_TRUE(written(Hardswish(true)));
  EXPECT_TRUE(written(Dropout(torch::nn::DropoutOptions().inplace(true))));
  EXPECT_FALSE(written(ReLU()));
}

TEST(DropoutModule, DrawsWhatTorchDrawsAndRestsInEvaluation) {
  const Tensor input = at::randn({40, 50});
  expect_like(torch::nn::Dropout(0.3), Dropout(0.3), input);
  Dropout rests(0.3);
  rests->eval();
  EXPECT_TRUE(rests->forward(input).equal(input));
  EXPECT_THROW(Dropout(1.5), c10::Error);
}

TEST(PoolingModules, ValuesAndGradientsAreThoseOfTorch) {
  const Tensor line = at::randn({2, 4, 11});
  const Tensor block = at::randn({2, 4, 6, 7, 8});
  expect_like(torch::nn::MaxPool1d(3), MaxPool1d(3), line);
  expect_like(torch::nn::MaxPool2d(3), MaxPool2d(3), images());
  expect_like(torch::nn::MaxPool3d(2), MaxPool3d(2), block);
  const auto window =
      torch::nn::MaxPool2dOptions({3, 2}).stride({2, 1}).padding(1).dilation({2, 1}).ceil_mode(
          true);
  expect_like(torch::nn::MaxPool2d(window), MaxPool2d(window), images());
  expect_like(torch::nn::AvgPool1d(3), AvgPool1d(3), line);
  expect_like(torch::nn::AvgPool2d(3), AvgPool2d(3), images());
  expect_like(torch::nn::AvgPool3d(2), AvgPool3d(2), block);
  const auto mean = torch::nn::AvgPool2dOptions(3).stride(2).padding(1).ceil_mode(true);
  const auto inner = torch::nn::AvgPool2dOptions(mean).count_include_pad(false);
  const auto divided = torch::nn::AvgPool2dOptions(mean).divisor_override(5);
  expect_like(torch::nn::AvgPool2d(inner), AvgPool2d(inner), images());
  expect_like(torch::nn::AvgPool2d(divided), AvgPool2d(divided), images());
  expect_like(torch::nn::AdaptiveAvgPool1d(4), AdaptiveAvgPool1d(4), line);
  const torch::nn::AdaptiveAvgPool2dOptions sizes({3, std::nullopt});
  expect_like(torch::nn::AdaptiveAvgPool2d(sizes), AdaptiveAvgPool2d(sizes), images());
  expect_like(torch::nn::AdaptiveAvgPool3d(3), AdaptiveAvgPool3d(3), block);
}

TEST(PoolingModules, IndicesAreThoseOfTorch) {
  const Tensor line = at::randn({2, 4, 11});
  const Tensor block = at::randn({2, 4, 6, 7, 8});
  const auto expect_indices = [](auto theirs, auto ours, const Tensor& input) {
    const auto [values, indices] = theirs->forward_with_indices(input);
    const auto [our_values, our_indices] = ours->forward_with_indices(input);
    EXPECT_TRUE(our_values.equal(values));
    EXPECT_TRUE(our_indices.equal(indices));
  };
  expect_indices(torch::nn::MaxPool1d(3), MaxPool1d(3), line);
  expect_indices(torch::nn::MaxPool2d(3), MaxPool2d(3), images());
  expect_indices(torch::nn::MaxPool3d(2), MaxPool3d(2), block);
}

// -- As modules --------------------------------------------------------------------------------

TEST(Modules, StateGoesBothWays) {
  BatchNorm2d ours(4);
  ours->forward(images());
  torch::nn::BatchNorm2d theirs(4);
  carry_over(ours, theirs);
  EXPECT_TRUE(theirs->running_mean.equal(ours->running_mean));
  EXPECT_EQ(theirs->num_batches_tracked.item<std::int64_t>(), 1);
  EXPECT_EQ(ours->named_parameters().keys(), theirs->named_parameters().keys());
  EXPECT_EQ(ours->named_buffers().keys(), theirs->named_buffers().keys());
}

TEST(Modules, MadeFromALayerOfTorchTheySharesItsTensors) {
  torch::nn::Conv2d theirs(4, 6, 3);
  theirs->weight.set_requires_grad(false);
  theirs->eval();
  const Conv2d ours(*theirs);
  EXPECT_TRUE(ours->weight.is_same(theirs->weight));
  EXPECT_TRUE(ours->named_parameters()["bias"].is_same(theirs->bias));
  EXPECT_FALSE(ours->weight.requires_grad());
  EXPECT_FALSE(ours->is_training());
  theirs->to(at::kDouble);
  EXPECT_EQ(ours->weight.scalar_type(), at::kDouble);
}

TEST(Modules, CloneIsALayerOfOursWithItsOwnTensors) {
  Conv2d layer(torch::nn::Conv2dOptions(4, 6, 3).stride(2));
  layer->recompute = true;
  layer->eval();
  const std::shared_ptr<torch::nn::Module> clone = layer->clone();
  const auto copy = std::dynamic_pointer_cast<Conv2dImpl>(clone);
  ASSERT_TRUE(copy);
  EXPECT_TRUE(copy->weight.equal(layer->weight));
  EXPECT_FALSE(copy->weight.is_same(layer->weight));
  EXPECT_TRUE(copy->weight.is_same(copy->named_parameters()["weight"]));
  EXPECT_EQ(copy->options.stride()->at(0), 2);
  EXPECT_TRUE(copy->recompute);
  EXPECT_FALSE(copy->is_training());
  const Tensor input = images();
  EXPECT_TRUE(copy->forward(input).equal(layer->forward(input)));
}

TEST(Modules, PrintTheirOwnNamespace) {
  std::ostringstream text;
  text << *Conv2d(3, 4, 5) << ' ' << *ReLU();
  EXPECT_EQ(text.str(),
            "brim::nn::Conv2d(3, 4, kernel_size=[5, 5], stride=[1, 1]) brim::nn::ReLU()");
}

TEST(Modules, RunInSequentialAndAnyModule) {
  torch::nn::Sequential model(Conv2d(4, 6, 3), BatchNorm2d(6), ReLU(), MaxPool2d(2),
                              ConvTranspose2d(6, 2, 3), AdaptiveAvgPool2d(1), Dropout(0.5));
  EXPECT_EQ(model->forward(images()).sizes(), (std::vector<std::int64_t>{2, 2, 1, 1}));
  EXPECT_EQ(model->at<Conv2dImpl>(0).options.out_channels(), 6);
  EXPECT_EQ(model->at<BatchNorm2dImpl>(1).options.num_features(), 6);
  torch::nn::AnyModule any(Linear(3, 2));
  EXPECT_EQ(any.forward(at::ones({5, 3})).sizes(), (std::vector<std::int64_t>{5, 2}));
  const auto clone = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(model->clone());
  ASSERT_TRUE(clone);
  EXPECT_TRUE(std::dynamic_pointer_cast<Conv2dImpl>(clone->ptr(0)));
}

}  // namespace
}  // namespace brim::nn
