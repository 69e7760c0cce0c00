#include <brim/nn/audit.h>
#include <brim/nn/convert.h>
#include <brim/nn/modules.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>

#include <array>
#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace brim::nn {
namespace {

using at::Tensor;
using torch::nn::Sequential;

constexpr std::int64_t kElements = std::int64_t{2} * 4 * 16 * 16;
constexpr std::int64_t kImage = 4 * kElements;  // bytes

Sequential images() {
  const auto conv = torch::nn::Conv2dOptions(4, 4, 3).padding(1);
  Sequential model{torch::nn::Conv2d(conv), torch::nn::BatchNorm2d(4), torch::nn::ReLU(),
                   torch::nn::Conv2d(conv)};
  model->eval();
  return model;
}

void freeze(torch::nn::Module& model) {
  for (Tensor& parameter : model.parameters()) {
    parameter.set_requires_grad(false);
  }
}

/// Kept by torch::nn and by brim, layer by layer.
std::vector<std::pair<std::int64_t, std::int64_t>> kept(const Audit& audit) {
  std::vector<std::pair<std::int64_t, std::int64_t>> result;
  for (const LayerAudit& layer : audit.layers) {
    result.emplace_back(layer.torch_nn, layer.brim);
  }
  return result;
}

TEST(Audit, SaysWhatEachLayerKeeps) {
  Sequential model = images();
  freeze(*model);
  model->at<torch::nn::Conv2dImpl>(0).weight.set_requires_grad(true);
  const Tensor x = at::randn({2, 4, 16, 16});
  const Audit found = audit(*model, [&] { return model->forward(x); });
  ASSERT_EQ(found.layers.size(), 4U);
  EXPECT_EQ(found.layers[1].name, "1");
  EXPECT_EQ(found.layers[1].type, "torch::nn::BatchNorm2d");
  const auto bytes = kept(found);
  EXPECT_EQ(bytes[0], std::make_pair(std::int64_t{0}, std::int64_t{0}))
      << "the input exists anyway";
  EXPECT_GE(bytes[1].first, kImage);
  EXPECT_LT(bytes[1].second, 256) << "a few numbers per channel";
  EXPECT_EQ(bytes[2], std::make_pair(kImage, kElements / 8)) << "the output, or its bits";
  EXPECT_EQ(bytes[3], std::make_pair(std::int64_t{0}, std::int64_t{0})) << "counted by the ReLU";
  EXPECT_EQ(found.torch_nn(), bytes[1].first + kImage);
}

TEST(Audit, BitsThatALaterLayerMakesNeedlessDoNotCount) {
  Sequential model = images();
  const Tensor x = at::randn({2, 4, 16, 16});
  const auto bytes = kept(audit(*model, [&] { return model->forward(x); }));
  EXPECT_EQ(bytes[2].second + bytes[3].second, kImage) << "one tensor for both, and no bits";
  EXPECT_LE(bytes[1].second, bytes[1].first);
}

TEST(Audit, LeavesLayersAndBuffersAsTheyWere) {
  Sequential model{torch::nn::BatchNorm2d(4), torch::nn::Dropout(0.5), ReLU()};
  const auto children = model->children();
  const Tensor mean = model[0]->as<torch::nn::BatchNorm2d>()->running_mean.clone();
  const Audit found = audit(*model, [&] { return model->forward(at::randn({2, 4, 16, 16})); });
  EXPECT_EQ(model->children(), children);
  EXPECT_EQ(model->ptr(2), children[2]);
  EXPECT_TRUE(model->at<torch::nn::DropoutImpl>(1).is_training()) << "with its type";
  EXPECT_TRUE(at::equal(model[0]->as<torch::nn::BatchNorm2d>()->running_mean, mean));
  EXPECT_LT(found.brim(), found.torch_nn());

  const auto fails = []() -> Tensor { throw std::runtime_error("no"); };
  EXPECT_THROW(audit(*model, fails), std::runtime_error);
  EXPECT_EQ(model->children(), children);
}

TEST(Audit, ForwardFindsTheLayersOfASequential) {
  Sequential model{torch::nn::Linear(8, 8), torch::nn::ReLU()};
  const Tensor x = at::randn({16, 8});
  const Audit found = audit(*model, [&] {
    const auto& linear = *model[0]->as<torch::nn::Linear>();
    return model->forward(x) + linear.weight.sum();
  });
  EXPECT_EQ(found.layers[1].brim, 16);
}

TEST(Audit, TheFirstLayerGetsItsOutputSize) {
  Sequential model{
      torch::nn::ConvTranspose1d(torch::nn::ConvTranspose1dOptions(2, 2, 3).stride(2))};
  const std::array<std::int64_t, 1> size{10};
  const std::optional<at::IntArrayRef> output_size(size);
  Tensor output;
  audit(*model, [&] { return output = model->forward(at::randn({1, 2, 4}), output_size); });
  EXPECT_EQ(output.size(2), 10);
}

/// A layer by its type, which cannot be replaced, and a container.
class TwoPartsImpl : public torch::nn::Module {
 public:
  TwoPartsImpl() {
    stem = register_module("stem", torch::nn::Linear(8, 8));
    body = register_module("body", Sequential(torch::nn::ReLU(), torch::nn::Dropout(0.5)));
  }
  Tensor forward(const Tensor& x) { return body->forward(stem->forward(x).sin()); }

  torch::nn::Linear stem{nullptr};
  Sequential body{nullptr};
};
TORCH_MODULE(TwoParts);

TEST(Audit, CountsWhatIsKeptOutsideOfContainersInOneRow) {
  TwoParts net;
  const Tensor x = at::randn({16, 8});
  const Audit found = audit(*net, [&] { return net->forward(x); });
  ASSERT_EQ(found.layers.size(), 4U);
  EXPECT_EQ(found.layers[0].name, "stem");
  EXPECT_EQ(found.layers[2].name, "body.1");
  EXPECT_EQ(found.layers[3].name, "(other)");
  EXPECT_EQ(found.layers[1].brim, 16);
  EXPECT_EQ(found.layers[3].torch_nn, 512) << "the input of sin";
  EXPECT_EQ(found.layers[3].brim, 512);
}

TEST(Audit, PrintsATable) {
  Sequential model{torch::nn::ReLU()};
  const Tensor x = at::randn({64}).requires_grad_();
  std::ostringstream text;
  text << audit(*model, [&] { return model->forward(x); });
  EXPECT_EQ(text.str(),
            "layer  type             torch::nn  brim\n"
            "---------------------------------------\n"
            "0      torch::nn::ReLU      256 B   8 B\n"
            "---------------------------------------\n"
            "total                       256 B   8 B\n");
}

}  // namespace
}  // namespace brim::nn
