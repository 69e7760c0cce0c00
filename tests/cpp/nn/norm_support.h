#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randn_like.h>
#include <brim/memory/peak_meter.h>
#include <brim/nn/functional.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

// What the tests of layers share.

namespace brim::tests {

using MaybeTensor = std::optional<at::Tensor>;

/// What a layer is called with: the input, then its weights. Undefined ones are not given.
using Tensors = std::vector<at::Tensor>;
using Layer = std::function<at::Tensor(const Tensors&)>;

inline MaybeTensor option(const at::Tensor& tensor) {
  return tensor.defined() ? MaybeTensor(tensor) : MaybeTensor();
}

inline at::Tensor normal(at::IntArrayRef sizes, at::ScalarType type = at::kFloat) {
  return at::randn(sizes, at::TensorOptions().dtype(at::kDouble)).to(type);
}

/// New leaves with the same values; bit i of `mask` says whether tensor i needs a gradient.
inline Tensors leaves(const Tensors& tensors, unsigned mask) {
  Tensors result;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    result.push_back(tensors[i].defined() ? tensors[i].detach() : at::Tensor());
    if (tensors[i].defined()) {
      result.back().set_requires_grad((mask >> i & 1U) != 0);
    }
  }
  return result;
}

struct Outcome {
  at::Tensor output;
  Tensors grads;  // undefined where none was asked for
};

inline Outcome outcome_of(const Layer& layer, const Tensors& tensors, const at::Tensor& cotangent) {
  Outcome outcome{layer(tensors), Tensors(tensors.size())};
  Tensors wanted;
  for (const at::Tensor& each : tensors) {
    if (each.defined() && each.requires_grad()) {
      wanted.push_back(each);
    }
  }
  if (wanted.empty()) {
    return outcome;
  }
  const auto grads = torch::autograd::grad({outcome.output}, wanted, {cotangent});
  std::size_t next = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].defined() && tensors[i].requires_grad()) {
      outcome.grads[i] = grads[next++];
    }
  }
  return outcome;
}

/// Equal up to `tolerance` of the largest value; 0: bit for bit.
inline void expect_same(const at::Tensor& got, const at::Tensor& want, double tolerance,
                        const std::string& what) {
  ASSERT_EQ(got.defined(), want.defined()) << what;
  if (!want.defined()) {
    return;
  }
  ASSERT_EQ(got.sizes(), want.sizes()) << what;
  ASSERT_EQ(got.scalar_type(), want.scalar_type()) << what;
  if (tolerance == 0) {
    EXPECT_TRUE(got.equal(want)) << what;
    return;
  }
  if (want.numel() == 0) {
    return;
  }
  const at::Tensor wide = want.to(at::kDouble);
  const double most = got.to(at::kDouble).sub(wide).abs().max().item<double>();
  EXPECT_LE(most, tolerance * std::max(1.0, wide.abs().max().item<double>())) << what;
}

inline void expect_same(const Outcome& got, const Outcome& want, double output_tolerance,
                        double grad_tolerance, const std::string& what) {
  expect_same(got.output, want.output, output_tolerance, what + ", output");
  for (std::size_t i = 0; i < want.grads.size(); ++i) {
    expect_same(got.grads[i], want.grads[i], grad_tolerance,
                what + ", gradient " + std::to_string(i));
  }
}

/// Bytes that stay allocated after forward beside the output: what is kept for backward.
inline std::int64_t kept_bytes(const Layer& layer, const Tensors& tensors) {
  const PeakMeter meter(at::kCPU);
  const at::Tensor output = layer(tensors);
  return meter.left() - static_cast<std::int64_t>(output.storage().nbytes());
}

struct Behind {
  at::Tensor weight_grad;
  std::int64_t kept = 0;  // bytes for backward, of both layers
};

/// A layer with a trainable weight behind this one: a convolution of kernel 1 over the channels, or
/// a linear layer where there is nothing but channels.
inline Behind behind(const Layer& layer, const Tensors& tensors, bool recompute,
                     bool channels_last_dim) {
  const std::int64_t dims = tensors[0].dim();
  const bool linear = channels_last_dim || dims == 2;
  std::vector<std::int64_t> sizes(linear ? 2 : static_cast<std::size_t>(dims), 1);
  sizes[0] = 3;
  sizes[1] = tensors[0].size(linear ? dims - 1 : 1);
  const at::Tensor weight =
      at::ones(sizes, tensors[0].options().requires_grad(false)).cumsum(1).set_requires_grad(true);
  const auto run = [&](const at::Tensor& input) {
    return linear ? nn::functional::linear(input, weight, {}, recompute)
                  : nn::functional::conv(input, weight, {}, {}, {}, {}, 1, recompute);
  };
  const PeakMeter meter(at::kCPU);
  const at::Tensor output = run(layer(tensors));
  Behind result;
  result.kept = meter.left() - static_cast<std::int64_t>(output.storage().nbytes());
  result.weight_grad = torch::autograd::grad({output}, {weight}, {output.detach()})[0];
  return result;
}

/// The layer gives its output again in backward, bit for bit, to a layer behind that keeps nothing
/// of it. For that it keeps its weight and bias as they were.
/// @param statistics bytes of the running statistics that it keeps too
inline void expect_recomputes(const Layer& layer, const Tensors& tensors, bool channels_last_dim,
                              std::int64_t statistics = 0) {
  const Behind kept = behind(layer, tensors, false, channels_last_dim);
  const Behind again = behind(layer, tensors, true, channels_last_dim);
  EXPECT_TRUE(again.weight_grad.equal(kept.weight_grad));
  std::int64_t copies = statistics;
  for (std::size_t i = 1; i < tensors.size(); ++i) {
    copies += static_cast<std::int64_t>(tensors[i].nbytes());
  }
  const auto input = static_cast<std::int64_t>(tensors[0].nbytes());
  EXPECT_EQ(again.kept, kept.kept - input + copies);
  EXPECT_LE(again.kept, kept.kept);
}

}  // namespace brim::tests
