#include <ATen/Context.h>
#include <ATen/ops/adaptive_avg_pool1d.h>
#include <ATen/ops/avg_pool3d.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/celu.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/conv_transpose1d.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/elu.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/group_norm.h>
#include <ATen/ops/hardsigmoid.h>
#include <ATen/ops/hardswish.h>
#include <ATen/ops/hardtanh.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/log_sigmoid.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/mish.h>
#include <ATen/ops/prelu.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/selu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/threshold.h>
#include <brim/nn/functional.h>
#include <torch/csrc/autograd/function.h>

#include "nn/norm_support.h"
#include "tensors.h"

// Each function once, with options that are not its defaults. tests/python/nn_cases.py goes through
// all options, types, layouts and mixes of frozen tensors.

namespace brim::tests {
namespace {

namespace F = nn::functional;

struct Function {
  const char* name;
  Layer ours;
  Layer torchs;
  Tensors tensors;
  double tolerance = 0;  // of gradients
};

std::vector<Function> functions() {
  const at::Tensor rows = normal({6, 8}).mul(3);
  const at::Tensor images = normal({2, 4, 9, 8});
  const Tensors normalized{images, normal({4}), normal({4})};
  const at::Tensor mean = normal({4});
  const at::Tensor var = normal({4}).square();
  return {
      {"relu", [](const Tensors& t) { return F::relu(t[0]); },
       [](const Tensors& t) { return at::relu(t[0]); }, Tensors{rows}},
      {"relu6", [](const Tensors& t) { return F::relu6(t[0]); },
       [](const Tensors& t) { return at::hardtanh(t[0], 0, 6); }, Tensors{rows}},
      {"hardtanh", [](const Tensors& t) { return F::hardtanh(t[0], -0.3, 0.7); },
       [](const Tensors& t) { return at::hardtanh(t[0], -0.3, 0.7); }, Tensors{rows}},
      {"leaky_relu", [](const Tensors& t) { return F::leaky_relu(t[0], 0.3); },
       [](const Tensors& t) { return at::leaky_relu(t[0], 0.3); }, Tensors{rows}},
      {"hardsigmoid", [](const Tensors& t) { return F::hardsigmoid(t[0]); },
       [](const Tensors& t) { return at::hardsigmoid(t[0]); }, Tensors{rows}},
      {"prelu",
       [](const Tensors& t) { return F::prelu(t[0], t[1]); },
       [](const Tensors& t) { return at::prelu(t[0], t[1]); },
       {images, normal({4})}},
      {"elu", [](const Tensors& t) { return F::elu(t[0], 0.5); },
       [](const Tensors& t) { return at::elu(t[0], 0.5); }, Tensors{rows}},
      {"elu in place", [](const Tensors& t) { return F::elu(t[0].mul(2), 0.5, true); },
       [](const Tensors& t) { return at::elu(t[0].mul(2), 0.5); }, Tensors{rows}, 1e-6},
      {"celu", [](const Tensors& t) { return F::celu(t[0], 0.3); },
       [](const Tensors& t) { return at::celu(t[0], 0.3); }, Tensors{rows}},
      {"selu", [](const Tensors& t) { return F::selu(t[0]); },
       [](const Tensors& t) { return at::selu(t[0]); }, Tensors{rows}},
      {"threshold", [](const Tensors& t) { return F::threshold(t[0], 0.3, 0.7); },
       [](const Tensors& t) { return at::threshold(t[0], 0.3, 0.7); }, Tensors{rows}},
      {"logsigmoid", [](const Tensors& t) { return F::logsigmoid(t[0]); },
       [](const Tensors& t) { return at::log_sigmoid(t[0]); }, Tensors{rows}},
      {"softsign", [](const Tensors& t) { return F::softsign(t[0]); },
       [](const Tensors& t) { return t[0].div(t[0].abs().add(1)); }, Tensors{rows}},
      {"softplus", [](const Tensors& t) { return F::softplus(t[0], 2, 1); },
       [](const Tensors& t) { return at::softplus(t[0], 2, 1); }, Tensors{rows}},
      {"hardswish", [](const Tensors& t) { return F::hardswish(t[0]); },
       [](const Tensors& t) { return at::hardswish(t[0]); }, Tensors{rows}},
      {"mish", [](const Tensors& t) { return F::mish(t[0]); },
       [](const Tensors& t) { return at::mish(t[0]); }, Tensors{rows}},
      {"sigmoid", [](const Tensors& t) { return F::sigmoid(t[0]); },
       [](const Tensors& t) { return at::sigmoid(t[0]); }, Tensors{rows}},
      {"tanh", [](const Tensors& t) { return F::tanh(t[0]); },
       [](const Tensors& t) { return at::tanh(t[0]); }, Tensors{rows}},
      {"gelu", [](const Tensors& t) { return F::gelu(t[0], "tanh"); },
       [](const Tensors& t) { return at::gelu(t[0], "tanh"); }, Tensors{rows}},
      {"silu", [](const Tensors& t) { return F::silu(t[0]); },
       [](const Tensors& t) { return at::silu(t[0]); }, Tensors{rows}},
      {"silu in place", [](const Tensors& t) { return F::silu(t[0].mul(2), true); },
       [](const Tensors& t) { return at::silu(t[0].mul(2)); }, Tensors{rows}},
      {"dropout", [](const Tensors& t) { return F::dropout(t[0], 0.3); },
       [](const Tensors& t) { return at::dropout(t[0], 0.3, true); }, Tensors{rows}},
      {"linear",
       [](const Tensors& t) { return F::linear(t[0], t[1], t[2]); },
       [](const Tensors& t) { return at::linear(t[0], t[1], t[2]); },
       {rows, normal({5, 8}), normal({5})}},
      {"conv",
       [](const Tensors& t) { return F::conv(t[0], t[1], t[2], {2, 1}, {1, 0}, {1, 2}, 2); },
       [](const Tensors& t) { return at::conv2d(t[0], t[1], t[2], {2, 1}, {1, 0}, {1, 2}, 2); },
       {images, normal({6, 2, 3, 3}), normal({6})}},
      {"conv_transpose",
       [](const Tensors& t) {
         return F::conv_transpose(t[0], t[1], option(t[2]), {2}, {1}, {1}, 2, {2});
       },
       [](const Tensors& t) {
         return at::conv_transpose1d(t[0], t[1], option(t[2]), {2}, {1}, {1}, 2, {2});
       },
       {normal({2, 4, 7}), normal({4, 3, 3}), {}}},
      {"batch_norm in training",
       [](const Tensors& t) { return F::batch_norm(t[0], {}, {}, t[1], t[2], true, 0.3, 1e-4); },
       [](const Tensors& t) {
         return at::batch_norm(t[0], t[1], t[2], {}, {}, true, 0.3, 1e-4, true);
       },
       normalized},
      {"batch_norm",
       [=](const Tensors& t) {
         return F::batch_norm(t[0], mean, var, t[1], t[2], false, 0.3, 1e-4);
       },
       [=](const Tensors& t) {
         return at::batch_norm(t[0], t[1], t[2], mean, var, false, 0.3, 1e-4, true);
       },
       normalized},
      {"layer_norm",
       [](const Tensors& t) { return F::layer_norm(t[0], {8}, t[1], t[2], 1e-4); },
       [](const Tensors& t) { return at::layer_norm(t[0], {8}, t[1], t[2], 1e-4); },
       {rows, normal({8}), normal({8})}},
      {"group_norm", [](const Tensors& t) { return F::group_norm(t[0], 2, t[1], t[2], 1e-4); },
       [](const Tensors& t) { return at::group_norm(t[0], 2, t[1], t[2], 1e-4); }, normalized},
      {"float32_rms_norm",
       [](const Tensors& t) { return F::float32_rms_norm(t[0], t[1], 1e-4); },
       [](const Tensors& t) { return at::rms_norm(t[0], {8}, t[1], 1e-4); },
       {rows, normal({8})},
       1e-5},
      {"rms_norm",
       [](const Tensors& t) { return F::rms_norm(t[0], {8}, t[1], 1e-4); },
       [](const Tensors& t) { return at::rms_norm(t[0], {8}, t[1], 1e-4); },
       {rows, normal({8})},
       1e-5},
      {"max_pool",
       [](const Tensors& t) { return F::max_pool(t[0], {3, 2}, {2, 1}, {1, 0}, {1, 2}, true); },
       [](const Tensors& t) { return at::max_pool2d(t[0], {3, 2}, {2, 1}, {1, 0}, {1, 2}, true); },
       Tensors{images}},
      {"avg_pool",
       [](const Tensors& t) { return F::avg_pool(t[0], {2, 3, 2}, {}, {1}, true, false, 5); },
       [](const Tensors& t) { return at::avg_pool3d(t[0], {2, 3, 2}, {}, {1}, true, false, 5); },
       Tensors{normal({2, 3, 4, 6, 5})}},
      {"adaptive_avg_pool", [](const Tensors& t) { return F::adaptive_avg_pool(t[0], {3}); },
       [](const Tensors& t) { return at::adaptive_avg_pool1d(t[0], {3}); },
       Tensors{normal({2, 3, 10})}},
  };
}

Outcome seeded(const Layer& layer, const Tensors& tensors, const at::Tensor& cotangent) {
  at::manual_seed(7);  // dropout
  return outcome_of(layer, tensors, cotangent);
}

TEST(Functional, ValuesAndGradientsAreTorchs) {
  for (const Function& f : functions()) {
    const at::Tensor cotangent = at::randn_like(f.torchs(f.tensors));
    for (const unsigned mask : {1U, 7U}) {
      const Tensors tensors = leaves(f.tensors, mask);
      // Without the weight's gradient, ARM has another kernel for the input's (see nn.md of docs).
      const bool is_conv = std::string(f.name).starts_with("conv");
      expect_same(seeded(f.ours, tensors, cotangent), seeded(f.torchs, tensors, cotangent), 0,
                  is_conv && mask == 1 ? 1e-5 : f.tolerance, f.name);
    }
  }
}

TEST(Functional, AnUndefinedGradientGivesNone) {
  for (const Function& f : functions()) {
    const at::Tensor output = f.ours(leaves(f.tensors, 7));
    ASSERT_NE(output.grad_fn(), nullptr) << f.name;
    for (const at::Tensor& grad : (*output.grad_fn())({at::Tensor()})) {
      EXPECT_FALSE(grad.defined()) << f.name;
    }
  }
}

TEST(Functional, WithoutGradientsNothingIsKept) {
  for (const Function& f : functions()) {
    const PeakMeter meter(at::kCPU);
    const at::Tensor output = f.ours(f.tensors);
    EXPECT_EQ(output.grad_fn(), nullptr) << f.name;
    EXPECT_EQ(meter.left(), static_cast<std::int64_t>(output.storage().nbytes())) << f.name;
  }
}

TEST(Functional, OneNumberStandsForAllDimensions) {
  const at::Tensor x = normal({2, 3, 12, 12});
  const at::Tensor weight = normal({4, 3, 3, 3});
  EXPECT_TRUE(F::max_pool(x, {3, 3}, {2}, {1}, {2})
                  .equal(at::max_pool2d(x, {3, 3}, {2, 2}, {1, 1}, {2, 2})));
  EXPECT_TRUE(F::conv(x, weight, {}, {2}, {1}, {2})
                  .equal(at::conv2d(x, weight, {}, {2, 2}, {1, 1}, {2, 2})));
}

TEST(Functional, SmoothActivationsKeepTheirInput) {
  const Tensors tensors = leaves({normal({1024})}, 1);
  EXPECT_EQ(kept_bytes([](const Tensors& t) { return F::gelu(t[0].mul(2)); }, tensors), 4096);
  EXPECT_EQ(kept_bytes([](const Tensors& t) { return F::silu(t[0].mul(2)); }, tensors), 4096);
  // The value that is overwritten, as torch.
  EXPECT_EQ(kept_bytes([](const Tensors& t) { return F::silu(t[0].mul(2), true); }, tensors), 4096);
  expect_recomputes([](const Tensors& t) { return F::silu(t[0]); }, leaves({normal({8, 50})}, 1),
                    true);
}

TEST(Functional, SmoothActivationsRefuseWhatTorchRefuses) {
  EXPECT_CONTAINS(message_of<c10::Error>([] { F::gelu(normal({3}), "sigmoid"); }), "approximate");
  EXPECT_THROW(F::gelu(normal({3}).to(at::kInt)), c10::Error);
  const at::Tensor leaf = normal({3}).set_requires_grad(true);
  EXPECT_THROW(F::silu(leaf, true), c10::Error);
}

}  // namespace
}  // namespace brim::tests
