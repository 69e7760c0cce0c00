#include <ATen/core/grad_mode.h>
#include <ATen/ops/_nested_tensor_from_tensor_list.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/conv_transpose1d.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/quantize_per_tensor.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>
#include <brim/nn/functional.h>

#include "nn/norm_support.h"
#include "tensors.h"

// Tensors that brim does not know go to torch's own operators.

namespace brim::tests {
namespace {

namespace F = nn::functional;

struct Pair {
  Layer ours;
  Layer torchs;
};

at::Tensor nested() {
  return at::_nested_tensor_from_tensor_list({normal({3, 8}), normal({5, 8})});
}

TEST(Known, NestedTensorsHaveTorchsResultsAndGradients) {
  const std::vector<Pair> pairs{
      {[](const Tensors& t) { return F::relu(t[0]); },
       [](const Tensors& t) { return at::relu(t[0]); }},
      {[](const Tensors& t) { return F::gelu(t[0]); },
       [](const Tensors& t) { return at::gelu(t[0]); }},
      {[](const Tensors& t) { return F::silu(t[0]); },
       [](const Tensors& t) { return at::silu(t[0]); }},
      {[](const Tensors& t) { return F::dropout(t[0], 1.0); },
       [](const Tensors& t) { return at::dropout(t[0], 1.0, true); }},
      {[](const Tensors& t) { return F::linear(t[0], t[1]); },
       [](const Tensors& t) { return at::linear(t[0], t[1]); }},
      {[](const Tensors& t) { return F::layer_norm(t[0], {8}, t[1][0], t[1][1]); },
       [](const Tensors& t) { return at::layer_norm(t[0], {8}, t[1][0], t[1][1]); }},
  };
  const at::Tensor input = nested();
  const at::Tensor weight = normal({4, 8});
  for (const Pair& pair : pairs) {
    Tensors found;
    for (const Layer& layer : {pair.ours, pair.torchs}) {
      const Tensors given = leaves({input, weight}, 1);
      const at::Tensor output = layer(given).to_padded_tensor(0.0);
      const Tensors grads = torch::autograd::grad({output.mul(output).sum()}, {given[0]});
      found.push_back(output.detach());
      found.push_back(grads[0].to_padded_tensor(0.0));
    }
    EXPECT_TRUE(found[0].equal(found[2]));
    EXPECT_TRUE(found[1].equal(found[3]));
  }
}

TEST(Known, NestedTensorsWorkInInferenceMode) {
  const c10::InferenceMode inference;
  const at::Tensor input = nested();
  EXPECT_TRUE(F::relu(input).to_padded_tensor(0.0).equal(at::relu(input).to_padded_tensor(0.0)));
}

TEST(Known, ComplexConvolutionsAreTorchs) {
  const auto complex = [](at::IntArrayRef sizes) {
    return at::complex(normal(sizes), normal(sizes));
  };
  const at::Tensor image = complex({2, 3, 6, 6});
  const at::Tensor weight = complex({4, 3, 3, 3}).requires_grad_();
  EXPECT_TRUE(F::conv(image, weight).equal(at::conv2d(image, weight)));
  const at::Tensor row = complex({2, 3, 6});
  const at::Tensor across = complex({3, 4, 3}).requires_grad_();
  EXPECT_TRUE(F::conv_transpose(row, across).equal(at::conv_transpose1d(row, across)));
}

TEST(Known, SparseAndQuantizedTensorsAreTorchs) {
  const at::Tensor sparse = at::relu(normal({4, 4})).to_sparse().requires_grad_();
  EXPECT_TRUE(F::relu(sparse).to_dense().equal(at::relu(sparse).to_dense()));
  const at::Tensor quantized = at::quantize_per_tensor(normal({4, 4}), 0.1, 3, at::kQUInt8);
  EXPECT_TRUE(F::relu(quantized).equal(at::relu(quantized)));
}

}  // namespace
}  // namespace brim::tests
