#include <brim/memory/budget.h>
#include <brim/memory/peak_meter.h>
#include <brim/memory/stats.h>
#include <brim/nn/convert.h>
#include <brim/nn/modules.h>
#include <brim/nn/pressure.h>
#include <brim/nn/run_block.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace brim::nn {
namespace {

using at::Tensor;
using torch::nn::Sequential;

std::vector<std::string> names(const std::vector<ConvertedLayer>& layers) {
  std::vector<std::string> result;
  result.reserve(layers.size());
  for (const ConvertedLayer& layer : layers) {
    result.push_back(layer.name);
  }
  return result;
}

/// A Sequential can hold another only as a class with a forward of its own.
class BlockImpl : public torch::nn::SequentialImpl {
 public:
  using SequentialImpl::SequentialImpl;
  Tensor forward(Tensor x) { return SequentialImpl::forward(std::move(x)); }
};
TORCH_MODULE(Block);

/// A user's model: a layer by its type, and a container.
class NetImpl : public torch::nn::Module {
 public:
  NetImpl() {
    stem = register_module("stem", torch::nn::Conv2d(3, 4, 3));
    body = register_module("body", Sequential(torch::nn::BatchNorm2d(4), torch::nn::ReLU()));
  }
  Tensor forward(const Tensor& x) { return body->forward(stem->forward(x)); }

  torch::nn::Conv2d stem{nullptr};
  Sequential body{nullptr};
};
TORCH_MODULE(Net);

Sequential convolutions() {
  return Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 4, 3).padding(1)),
                    torch::nn::BatchNorm2d(4), torch::nn::ReLU(), torch::nn::MaxPool2d(2),
                    torch::nn::Conv2d(4, 2, 3));
}

TEST(Convert, SequentialTrainsAsBefore) {
  Sequential model = convolutions();
  const auto twin = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(model->clone());
  torch::optim::SGD optimizer(model->parameters(), 0.1);  // made before
  torch::optim::SGD twin_optimizer(twin->parameters(), 0.1);

  const ConversionReport report = convert(*model);
  EXPECT_EQ(names(report.replaced), (std::vector<std::string>{"0", "1", "2", "3", "4"}));
  EXPECT_TRUE(report.kept.empty());
  EXPECT_EQ(report.replaced[0].type, "torch::nn::Conv2d");

  for (int step = 0; step < 3; ++step) {
    const Tensor x = at::randn({2, 4, 12, 12});
    const Tensor loss = model->forward(x).pow(2).mean();
    const Tensor twin_loss = twin->forward(x).pow(2).mean();
    EXPECT_TRUE(at::allclose(loss, twin_loss, 1e-5, 1e-6));
    optimizer.zero_grad();
    twin_optimizer.zero_grad();
    loss.backward();
    twin_loss.backward();
    optimizer.step();
    twin_optimizer.step();
  }
  const auto parameters = twin->named_parameters();
  for (const auto& parameter : model->named_parameters()) {
    EXPECT_TRUE(at::allclose(parameter.value(), parameters[parameter.key()], 1e-5, 1e-6))
        << parameter.key();
  }
}

TEST(Convert, TensorsNamesAndFlagsStay) {
  Sequential model({{"conv", torch::nn::AnyModule(torch::nn::Conv2d(3, 4, 3))},
                    {"norm", torch::nn::AnyModule(torch::nn::BatchNorm2d(4))}});
  model->eval();
  const auto before = model->named_parameters();
  before["conv.weight"].set_requires_grad(false);
  const auto buffers = model->named_buffers();
  convert(*model);
  EXPECT_EQ(model->named_children().keys(), (std::vector<std::string>{"conv", "norm"}));
  for (const auto& parameter : model->named_parameters()) {
    EXPECT_TRUE(parameter.value().is_same(before[parameter.key()])) << parameter.key();
  }
  for (const auto& buffer : model->named_buffers()) {
    EXPECT_TRUE(buffer.value().is_same(buffers[buffer.key()])) << buffer.key();
  }
  EXPECT_FALSE(model->at<Conv2dImpl>(0).weight.requires_grad());
  EXPECT_FALSE(model[1]->is_training());
  EXPECT_EQ(model->named_children()["conv"], model->ptr(0)) << "one layer, in both of its places";
  EXPECT_TRUE(model[0]->as<torch::nn::Conv2d>() != nullptr);
}

TEST(Convert, ContainersInsideOtherModulesAreReached) {
  Net net;
  Sequential model(Block(torch::nn::Linear(3, 3), Block(torch::nn::ReLU())));
  EXPECT_EQ(names(convert(*model).replaced), (std::vector<std::string>{"0.0", "0.1.0"}));

  const ConversionReport report = convert(*net);
  EXPECT_EQ(names(report.replaced), (std::vector<std::string>{"body.0", "body.1"}));
  ASSERT_EQ(names(report.kept), std::vector<std::string>{"stem"});
  EXPECT_NE(report.kept[0].reason.find("no container"), std::string::npos);
  EXPECT_EQ(net->named_children()["stem"], net->stem.ptr()) << "what the parent calls";
  EXPECT_TRUE(net->forward(at::randn({2, 3, 8, 8})).defined());
}

TEST(Convert, ListsAndDictionariesHoldTheNewLayers) {
  torch::nn::ModuleList list(torch::nn::Linear(3, 4), torch::nn::ReLU());
  convert(*list);
  EXPECT_TRUE(list[0]->as<Linear>() != nullptr);
  EXPECT_EQ(list->named_children()["1"], list[1]);

  torch::nn::ModuleDict dict(
      std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>>{
          {"a", torch::nn::Linear(3, 4).ptr()}, {"b", torch::nn::GELU().ptr()}});
  const auto popped = dict->pop("b");
  const ConversionReport report = convert(*dict);
  EXPECT_TRUE(dict["a"]->as<Linear>() != nullptr);
  EXPECT_EQ(dict->named_children()["a"], dict["a"]);
  EXPECT_EQ(names(report.kept), std::vector<std::string>{"b"}) << "registered, but no element";
}

TEST(Convert, ASharedLayerStaysOneLayer) {
  const torch::nn::Linear shared(4, 4);
  const torch::nn::ModuleList other(shared);
  torch::nn::ModuleDict model(
      std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>>{
          {"twice", Sequential(shared, torch::nn::ReLU(), shared).ptr()}, {"list", other.ptr()}});
  const ConversionReport report = convert(*model);
  EXPECT_EQ(names(report.replaced),
            (std::vector<std::string>{"twice.0", "twice.1", "twice.2", "list.0"}));
  const auto sequential =
      std::dynamic_pointer_cast<torch::nn::SequentialImpl>(model->named_children()["twice"]);
  const auto children = sequential->named_children();
  EXPECT_TRUE(sequential->ptr(0)->as<Linear>() != nullptr);
  EXPECT_EQ(sequential->ptr(0), sequential->ptr(2));
  EXPECT_EQ(children["0"], sequential->ptr(0));
  EXPECT_EQ(children["2"], sequential->ptr(0));
  EXPECT_EQ(other->ptr(0), sequential->ptr(0));
}

class OwnLinearImpl : public torch::nn::LinearImpl {
 public:
  using LinearImpl::LinearImpl;
  Tensor forward(const Tensor& x) { return LinearImpl::forward(x) * 2; }
};
TORCH_MODULE(OwnLinear);

TEST(Convert, WhatIsKeptHasItsReason) {
  Sequential model(OwnLinear(2, 2), ReLU(), torch::nn::Functional(torch::tanh),
                   torch::nn::Linear(2, 2));
  const ConversionReport report = convert(*model, {.only = {}, .skip = {"3"}});
  EXPECT_TRUE(report.replaced.empty());
  ASSERT_EQ(names(report.kept), (std::vector<std::string>{"0", "1", "2", "3"}));
  EXPECT_NE(report.kept[0].reason.find("derived"), std::string::npos);
  EXPECT_NE(report.kept[1].reason.find("already"), std::string::npos);
  EXPECT_NE(report.kept[2].reason.find("no counterpart"), std::string::npos);
  EXPECT_NE(report.kept[3].reason.find("`skip`"), std::string::npos);
  std::ostringstream text;
  text << report;
  EXPECT_EQ(text.str().find("0 layers replaced, 4 kept as they are\n\nlayer  type"), 0U);
  EXPECT_TRUE(text.str().ends_with(" left out by `skip`\n")) << text.str();

  torch::nn::Linear alone(2, 2);
  ASSERT_EQ(convert(*alone).kept.size(), 1U);
  EXPECT_NE(convert(*alone).kept[0].reason.find("the model itself"), std::string::npos);
}

TEST(Convert, OnlyAndSkipTakePatternsTypesAndFunctions) {
  const auto replaced = [](const ConvertOptions& options) {
    Sequential model(Block(torch::nn::Linear(2, 2), torch::nn::ReLU()), torch::nn::Linear(2, 2),
                     torch::nn::ReLU());
    return names(convert(*model, options).replaced);
  };
  using Names = std::vector<std::string>;
  const auto is_second = [](const std::string& name, const torch::nn::Module&) {
    return name == "1";
  };
  const LayerChoice linear = LayerChoice::type<torch::nn::LinearImpl>();
  EXPECT_EQ(replaced({.only = {"0"}}), (Names{"0.0", "0.1"})) << "what is inside too";
  EXPECT_EQ(replaced({.only = {"?.1"}}), Names{"0.1"});
  EXPECT_EQ(replaced({.only = {linear}}), (Names{"0.0", "1"}));
  EXPECT_EQ(replaced({.only = {LayerChoice::type<BlockImpl>(), is_second}}),
            (Names{"0.0", "0.1", "1"}));
  EXPECT_EQ(replaced({.only = {linear}, .skip = {is_second}}), Names{"0.0"});
  EXPECT_EQ(replaced({.only = {}, .skip = {"0.*", "2"}}), Names{"1"});
  EXPECT_THROW(replaced({.only = {"head"}}), c10::ValueError);
}

TEST(Convert, AnErrorOfAFunctionComesOutAndNothingIsReplaced) {
  Sequential model = convolutions();
  const auto fails = [](const std::string& name, const torch::nn::Module&) -> bool {
    return name == "4" ? throw std::runtime_error("no") : true;
  };
  EXPECT_THROW(convert(*model, {.only = {fails}}), std::runtime_error);
  EXPECT_EQ(convert(*model).replaced.size(), 5U);
}

TEST(Convert, RecomputeIsSetWhereThereIsSuchAnOption) {
  Sequential model = convolutions();
  convert(*model, {.only = {"0"}});
  EXPECT_FALSE(model->at<Conv2dImpl>(0).recompute);
  convert(*model, {.recompute = true});
  EXPECT_TRUE(model->at<Conv2dImpl>(0).recompute) << "brim's already";
  EXPECT_TRUE(model->at<Conv2dImpl>(4).recompute);
  EXPECT_TRUE(model->at<ReLUImpl>(2).recompute);
  EXPECT_FALSE(model->at<Conv2dImpl>(0).runs_again);
}

TEST(Convert, ProductsAreSetWithRecomputeAndUnsetWithout) {
  Sequential model = convolutions();
  convert(*model, {.products = true});
  EXPECT_TRUE(model->at<Conv2dImpl>(0).recompute);
  EXPECT_TRUE(model->at<Conv2dImpl>(0).runs_again);
  convert(*model, {.recompute = true});
  EXPECT_FALSE(model->at<Conv2dImpl>(0).runs_again);
}

TEST(Convert, AutomaticLayersKeepEverythingUntilMemoryIsShort) {
  at::manual_seed(0);
  const auto linear = [](int in, int out) { return torch::nn::Linear(in, out); };
  Sequential model;
  for (int i = 0; i < 4; ++i) {
    model->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({16})));
    model->push_back(linear(16, 64));
    model->push_back(torch::nn::GELU());
    model->push_back(linear(64, 16));
  }
  const Tensor x = at::randn({256, 16});
  const auto gradient = [&] {
    model->zero_grad();
    model->forward(x).square().mean().backward();
    return model[1]->as<torch::nn::Module>()->named_parameters()["weight"].grad().clone();
  };
  const Tensor expected = gradient();
  convert(*model, {.automatic = true});
  reset_pressure();
  PeakMeter meter(at::kCPU);
  EXPECT_TRUE(gradient().equal(expected));
  const std::int64_t peak = meter.peak();
  EXPECT_EQ(pressure().recomputed, 0);
  {
    const Budget budget(memory_stats(at::kCPU).allocated + peak / 2, at::kCPU);
    for (int i = 0; i < 3; ++i) {
      EXPECT_TRUE(gradient().equal(expected));
    }
  }
  const Pressure found = pressure();
  EXPECT_GT(found.dropped_bytes, 0);
  EXPECT_GT(found.foreseen, 0) << "the second step knew";
  EXPECT_GT(found.recomputed, 0);
  EXPECT_GT(found.seconds, 0);
  EXPECT_EQ(found.values, 0) << "no graph is left";

  const Budget budget(memory_stats(at::kCPU).allocated + peak / 2, at::kCPU);
  std::int64_t most = 0;
  std::int64_t given_up = 0;
  for (const PressureMoment& moment : record_pressure([&] { gradient(); }, at::kCPU)) {
    most = std::max(most, moment.held);
    given_up = std::max(given_up, moment.given_up);
  }
  EXPECT_LE(most, budget.limit());
  EXPECT_GT(given_up, 0);
}

std::vector<Sequential> normalised_layers() {
  torch::manual_seed(0);
  std::vector<Sequential> layers;
  for (int i = 0; i < 6; ++i) {
    Sequential layer;
    for (int part = 0; part < 3; ++part) {
      layer->push_back(torch::nn::Linear(16, 16));
      layer->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({16})));
      layer->push_back(torch::nn::Dropout(0.1));
    }
    layer->push_back(torch::nn::BatchNorm1d(16));
    convert(*layer, {.automatic = true});
    layers.push_back(layer);
  }
  return layers;
}

/// Gradients and running statistics after a step.
std::vector<Tensor> step_of(std::vector<Sequential>& layers, const Tensor& x, bool as_blocks) {
  torch::manual_seed(1);
  Tensor y = x;
  for (Sequential& layer : layers) {
    layer->zero_grad();
    const auto call = [&](const std::vector<Tensor>& in) { return layer->forward(in[0]); };
    y = as_blocks ? run_block(*layer, call, {y}) : call({y});
  }
  y.square().mean().backward();
  std::vector<Tensor> found;
  for (Sequential& layer : layers) {
    for (const Tensor& parameter : layer->parameters()) {
      found.push_back(parameter.grad().clone());
    }
    for (const Tensor& buffer : layer->buffers()) {
      found.push_back(buffer.clone());
    }
  }
  return found;
}

TEST(Convert, BlocksRunAgainWhereNothingElseIsLeft) {
  std::vector<Sequential> kept = normalised_layers();
  std::vector<Sequential> ours = normalised_layers();
  const Tensor x = at::randn({512, 16});
  reset_pressure();
  std::vector<std::vector<Tensor>> expected;
  PeakMeter meter(at::kCPU);
  for (int step = 0; step < 3; ++step) {
    expected.push_back(step_of(kept, x, false));
  }
  const std::int64_t peak = meter.peak();
  {
    const Budget budget(memory_stats(at::kCPU).allocated + peak * 6 / 10, at::kCPU);
    for (const std::vector<Tensor>& wanted : expected) {
      const std::vector<Tensor> found = step_of(ours, x, true);
      ASSERT_EQ(found.size(), wanted.size());
      for (std::size_t i = 0; i < found.size(); ++i) {
        EXPECT_TRUE(found[i].equal(wanted[i])) << i;
      }
    }
  }
  EXPECT_GT(pressure().blocks, 0);
  EXPECT_EQ(pressure().values, 0) << "no graph is left";
  EXPECT_THROW(run_block(*ours[0], [](const auto& in) { return in[0]; }, {}), c10::ValueError);
}

TEST(Convert, RestorePutsTorchsLayersBack) {
  Sequential model = convolutions();
  const auto before = model->named_parameters();
  convert(*model);
  model->eval();
  const ConversionReport report = restore(*model);
  EXPECT_EQ(report.replaced.size(), 5U);
  EXPECT_TRUE(report.kept.empty());
  EXPECT_EQ(report.replaced[0].type, "brim::nn::Conv2d");
  EXPECT_TRUE(model->at<torch::nn::Conv2dImpl>(0).weight.is_same(before["0.weight"]));
  EXPECT_FALSE(model[1]->is_training()) << "the flag of now";
  EXPECT_TRUE(model[0]->as<Conv2d>() == nullptr);
  EXPECT_TRUE(restore(*model).replaced.empty());
}

TEST(Convert, RestoreReportsLayersThatAParentHoldsByType) {
  class HolderImpl : public torch::nn::Module {
   public:
    HolderImpl() { conv = register_module("conv", Conv2d(1, 1, 1)); }
    Conv2d conv{nullptr};
  };
  HolderImpl holder;
  EXPECT_EQ(names(restore(holder).kept), std::vector<std::string>{"conv"});
}

TEST(Convert, AFrozenModelKeepsAFractionForBackward) {
  Sequential model;
  for (int i = 0; i < 4; ++i) {
    model->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(8, 8, 3).padding(1)));
    model->push_back(torch::nn::BatchNorm2d(8));
    model->push_back(torch::nn::ReLU());
  }
  model->eval();
  for (Tensor& parameter : model->parameters()) {
    parameter.set_requires_grad(false);
  }
  const Tensor input = at::randn({4, 8, 32, 32}).requires_grad_();
  const auto kept = [&] {
    const PeakMeter meter(at::kCPU);
    const Tensor output = model->forward(input);
    return meter.left() - static_cast<std::int64_t>(output.nbytes());
  };
  const std::int64_t torch_keeps = kept();
  convert(*model);
  const std::int64_t brim_keeps = kept();
  // A bit an element of each of four ReLUs, beside a few small tensors.
  EXPECT_LT(brim_keeps, static_cast<std::int64_t>(input.nbytes()) / 4);
  EXPECT_GT(torch_keeps, 20 * brim_keeps);
}

}  // namespace
}  // namespace brim::nn
