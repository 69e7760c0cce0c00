#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/max_pool1d_with_indices.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/max_pool2d_with_indices.h>
#include <ATen/ops/max_pool3d_with_indices.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <brim/memory/peak_meter.h>
#include <brim/nn/functional.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function.h>

#include <tuple>

#include "nn/pool_support.h"
#include "tensors.h"

namespace brim::nn {
namespace {

using tests::gradient;
using tests::leaf;
using tests::message_of;
using tests::normal_like;
using tests::normal_numbers;
using tests::Numbers;
using tests::operator_named;
using tests::PoolCase;
using tests::PoolCases;
using tests::same;

using TwoTensors = std::tuple<at::Tensor, at::Tensor>;

constexpr std::int64_t kPlacesInAByte = 256;

TwoTensors torchs(const PoolCase& c, const at::Tensor& input) {
  switch (c.dims) {
    case 1:
      return at::max_pool1d_with_indices(input, c.kernel, c.stride, c.padding, c.dilation,
                                         c.ceil_mode);
    case 2:
      return at::max_pool2d_with_indices(input, c.kernel, c.stride, c.padding, c.dilation,
                                         c.ceil_mode);
    default:
      return at::max_pool3d_with_indices(input, c.kernel, c.stride, c.padding, c.dilation,
                                         c.ceil_mode);
  }
}

at::Tensor ours(const PoolCase& c, const at::Tensor& input) {
  return functional::max_pool(input, c.kernel, c.stride, c.padding, c.dilation, c.ceil_mode);
}

void expect_as_torch(const PoolCase& c, const at::Tensor& numbers) {
  SCOPED_TRACE(c.text());
  const at::Tensor x = leaf(numbers);
  const auto [expected, expected_indices] = torchs(c, x);
  const at::Tensor output = ours(c, x);
  ASSERT_TRUE(same(output, expected));
  const at::Tensor cotangent = normal_like(output);
  const at::Tensor expected_gradient = gradient(expected, x, cotangent);
  EXPECT_TRUE(same(gradient(output, x, cotangent), expected_gradient));

  const auto [again, indices] =
      functional::max_pool_with_indices(x, c.kernel, c.stride, c.padding, c.dilation, c.ceil_mode);
  EXPECT_TRUE(same(again, expected));
  EXPECT_TRUE(at::equal(indices, expected_indices));
  EXPECT_FALSE(indices.requires_grad());
  EXPECT_TRUE(same(gradient(again, x, cotangent), expected_gradient));
}

/// torch 2.11 to 2.15 misplace the maximum of a window of -inf in the last channels of
/// channels_last_3d, outside of the window; elsewhere they take the window's first.
bool torch_misplaces(const PoolCase& c) {
  return c.input.dim() == 5 && c.input.suggest_memory_format() != at::MemoryFormat::Contiguous;
}

TEST(MaxPool, EqualsTorchForRandomOptions) {
  PoolCases cases(1);
  for (int i = 0; i < 300; ++i) {
    const PoolCase c = cases.next();
    expect_as_torch(c, c.input);
  }
}

TEST(MaxPool, TakesTheFirstOfEqualValues) {
  PoolCases cases(2);
  for (int i = 0; i < 200; ++i) {
    const PoolCase c = cases.next();
    expect_as_torch(c, tests::with_ties(c.input));
  }
}

TEST(MaxPool, TreatsNanAndInfinityAsTorch) {
  PoolCases cases(3);
  for (int i = 0; i < 200; ++i) {
    const PoolCase c = cases.next();
    if (!torch_misplaces(c)) {
      expect_as_torch(c, tests::with_strange_numbers(c.input));
    }
  }
}

TEST(MaxPool, KeepsTheSignOfZero) {
  for (const at::ScalarType type : tests::kFloatingTypes) {
    const at::Tensor x = at::tensor({-0.0, 0.0, 0.0, -0.0}).to(type).view({1, 4});
    const at::Tensor output = functional::max_pool(leaf(x), {2});
    EXPECT_TRUE(
        at::equal(output.reciprocal(), at::tensor({-1.0, 1.0}).to(type).div(0).view({1, 2})));
  }
}

TEST(MaxPool, FindsThePlaceOfAMaximumInAWindowOf256) {
  PoolCase c;
  c.kernel = c.stride = {16, 16};
  c.padding = {0, 0};
  c.dilation = {1, 1};
  c.input = normal_numbers({2, 3, 48, 33}, at::kFloat);
  expect_as_torch(c, c.input);
  // The last place of all.
  const at::Tensor x = leaf(at::arange(256, at::kFloat).view({1, 16, 16}));
  EXPECT_EQ(gradient(functional::max_pool(x, {16, 16}), x, at::ones({1, 1, 1}))
                .flatten()[255]
                .item<float>(),
            1);
}

TEST(MaxPool, LeavesLargerWindowsToTorch) {
  const at::Tensor x = leaf(normal_numbers({1, 2, 40, 40}, at::kFloat));
  const at::Tensor output = functional::max_pool(x, {17, 16});
  static_assert(17 * 16 > kPlacesInAByte);
  EXPECT_EQ(output.grad_fn()->name(), "MaxPool2DWithIndicesBackward0");
  EXPECT_TRUE(same(output, at::max_pool2d(x, {17, 16})));
  EXPECT_EQ(functional::max_pool(x, {16, 16}).grad_fn()->name(), "brim::max_pool_backward");
}

TEST(MaxPool, KeepsOneByteAnOutput) {
  for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
    const at::Tensor x = leaf(normal_numbers({2, 16, 32, 32}, at::kFloat).contiguous(format));
    const PeakMeter meter(at::kCPU);
    const at::Tensor output = functional::max_pool(x, {3, 3}, {2, 2}, {1, 1});
    EXPECT_EQ(meter.left(), output.numel() * (4 + 1));
    EXPECT_EQ(meter.peak(), output.numel() * (4 + 1));
  }
}

TEST(MaxPool, WithIndicesKeepsOneByteAnOutputBesidesThem) {
  const at::Tensor x = leaf(normal_numbers({2, 16, 32, 32}, at::kFloat));
  const PeakMeter meter(at::kCPU);
  const auto [output, indices] = functional::max_pool_with_indices(x, {2, 2});
  EXPECT_EQ(meter.left(), output.numel() * (4 + 1 + 8));
}

TEST(MaxPool, BackwardNeedsNoMoreThanTheGradient) {
  const at::Tensor x = leaf(normal_numbers({2, 16, 32, 32}, at::kFloat));
  const at::Tensor output = functional::max_pool(x, {3, 3}, {2, 2}, {1, 1});
  const at::Tensor cotangent = normal_like(output);
  const PeakMeter meter(at::kCPU);
  const at::Tensor result = gradient(output, x, cotangent);
  EXPECT_EQ(meter.peak(), result.numel() * 4);
}

TEST(MaxPool, KeepsNothingWithoutGradient) {
  const at::Tensor x = normal_numbers({2, 4, 8, 8}, at::kFloat);
  const PeakMeter meter(at::kCPU);
  const at::Tensor output = functional::max_pool(x, {2, 2});
  EXPECT_FALSE(output.requires_grad());
  EXPECT_EQ(meter.left(), output.numel() * 4);
}

TEST(MaxPool, GivesTheLayoutThatTorchGives) {
  const at::Tensor image =
      leaf(normal_numbers({2, 5, 8, 8}, at::kFloat).contiguous(at::MemoryFormat::ChannelsLast));
  const at::Tensor output = functional::max_pool(image, {2, 2});
  EXPECT_EQ(output.strides(), at::max_pool2d(image, {2, 2}).strides());
  EXPECT_EQ(gradient(output, image, normal_like(output)).strides(), image.strides());
}

TEST(MaxPool, SecondDerivativeEqualsTorchs) {
  PoolCases cases(4);
  for (int i = 0; i < 60; ++i) {
    const PoolCase c = cases.next();
    SCOPED_TRACE(c.text());
    const at::Tensor x = leaf(c.input.to(at::kDouble));
    const at::Tensor output = ours(c, x);
    const at::Tensor cotangent = leaf(normal_like(output));
    const at::Tensor direction = normal_like(x);
    const at::Tensor first = gradient(output, x, cotangent, true);
    const at::Tensor expected = gradient(std::get<0>(torchs(c, x)), x, cotangent, true);
    EXPECT_TRUE(same(gradient(first, cotangent, direction, true),
                     gradient(expected, cotangent, direction)));
  }
}

TEST(MaxPool, TakesEmptyBatchesAsTorch) {
  const at::Tensor x = leaf(at::empty({0, 3, 8, 8}));
  const at::Tensor output = functional::max_pool(x, {2, 2});
  EXPECT_EQ(output.sizes(), (Numbers{0, 3, 4, 4}));
  EXPECT_EQ(gradient(output, x, at::empty({0, 3, 4, 4})).sizes(), x.sizes());
}

TEST(MaxPool, OneNumberStandsForAllDimensions) {
  const at::Tensor x = leaf(normal_numbers({2, 3, 12, 12}, at::kFloat));
  EXPECT_TRUE(same(functional::max_pool(x, {3, 3}, {2}, {1}, {2}),
                   at::max_pool2d(x, {3, 3}, {2, 2}, {1, 1}, {2, 2})));
}

TEST(MaxPool, SaysWhatIsWrong) {
  const at::Tensor x = leaf(normal_numbers({2, 3, 8, 8}, at::kFloat));
  EXPECT_CONTAINS(message_of<c10::ValueError>([&] { functional::max_pool(x, {}); }), "kernel_size");
  EXPECT_CONTAINS(message_of<c10::ValueError>([&] { functional::max_pool(x, {2, 2, 2, 2}); }),
                  "[2, 2, 2, 2]");
  EXPECT_CONTAINS(message_of<c10::ValueError>([&] { functional::max_pool(x, {2, 2}, {1, 1, 1}); }),
                  "stride");
  // torch's own words.
  for (const auto& [kernel, stride, padding, dilation] :
       std::vector<std::tuple<Numbers, Numbers, Numbers, Numbers>>{
           {{0, 2}, {1, 1}, {0, 0}, {1, 1}},
           {{2, 2}, {0, 1}, {0, 0}, {1, 1}},
           {{2, 2}, {1, 1}, {2, 0}, {1, 1}},
           {{2, 2}, {1, 1}, {-1, 0}, {1, 1}},
           {{2, 2}, {1, 1}, {0, 0}, {1, 0}},
           {{9, 2}, {1, 1}, {0, 0}, {1, 1}}}) {
    const auto said = [&](const auto& pool) {
      const std::string text =
          message_of<c10::Error>([&] { pool(x, kernel, stride, padding, dilation, false); });
      return text.substr(0, text.find('\n'));
    };
    EXPECT_EQ(said([](auto&&... a) { functional::max_pool(a...); }),
              said([](auto&&... a) { at::max_pool2d(a...); }));
  }
  EXPECT_CONTAINS(message_of<c10::Error>([&] { functional::max_pool(x[0][0], {2, 2}); }), "3D");
}

using PackOp = TwoTensors(const at::Tensor&, at::IntArrayRef, at::IntArrayRef, at::IntArrayRef,
                          at::IntArrayRef, bool);
using ScatterOp = at::Tensor(const at::Tensor&, const at::Tensor&, c10::SymIntArrayRef,
                             at::IntArrayRef, at::IntArrayRef, at::IntArrayRef, at::IntArrayRef,
                             bool);

bool channels_last(const at::Tensor& offsets) {
  return offsets.dim() > 2 && !offsets.is_contiguous();
}

TEST(MaxPool, AtenOperatorsAloneGiveTheSame) {
  const auto pack = operator_named<PackOp>("brim::max_pool_pack");
  const auto scatter = operator_named<ScatterOp>("brim::max_pool_scatter");
  // A backend without kernels of ours.
  const c10::DispatchKeySet other(c10::DispatchKey::PrivateUse1);
  PoolCases cases(5);
  for (int i = 0; i < 100; ++i) {
    const PoolCase c = cases.next();
    SCOPED_TRACE(c.text());
    const auto [output, offsets] =
        pack.call(c.input, c.kernel, c.stride, c.padding, c.dilation, c.ceil_mode);
    const auto [expected, expected_offsets] =
        pack.redispatch(other, c.input, c.kernel, c.stride, c.padding, c.dilation, c.ceil_mode);
    EXPECT_TRUE(same(output, expected));
    EXPECT_TRUE(at::equal(offsets, expected_offsets));
    EXPECT_EQ(offsets.strides(), expected_offsets.strides());
    const at::Tensor cotangent = normal_like(output).to(at::kDouble);
    const auto sizes = c10::fromIntArrayRefSlow(c.input.sizes());
    const at::Tensor result = scatter.call(cotangent, offsets, sizes, c.kernel, c.stride, c.padding,
                                           c.dilation, channels_last(offsets));
    EXPECT_TRUE(
        at::allclose(result,
                     scatter.redispatch(other, cotangent, offsets, sizes, c.kernel, c.stride,
                                        c.padding, c.dilation, channels_last(offsets)),
                     1e-12, 1e-12));
  }
}

TEST(MaxPool, MetaTensorsHaveTheShapesOfRealOnes) {
  const auto pack = operator_named<PackOp>("brim::max_pool_pack");
  PoolCases cases(6);
  for (int i = 0; i < 100; ++i) {
    const PoolCase c = cases.next();
    SCOPED_TRACE(c.text());
    const auto [output, offsets] =
        pack.call(c.input, c.kernel, c.stride, c.padding, c.dilation, c.ceil_mode);
    const auto [meta, meta_offsets] =
        pack.call(c.input.to(at::kMeta), c.kernel, c.stride, c.padding, c.dilation, c.ceil_mode);
    EXPECT_EQ(meta.sizes(), output.sizes());
    EXPECT_EQ(meta.strides(), output.strides());
    EXPECT_EQ(meta_offsets.strides(), offsets.strides());
    EXPECT_EQ(meta_offsets.scalar_type(), at::kByte);
  }
}

TEST(MaxPool, OffsetsThatPointNowhereDoNoHarm) {
  const auto scatter = operator_named<ScatterOp>("brim::max_pool_scatter");
  for (const bool last : {false, true}) {
    const at::Tensor offsets = at::full({1, 2, 4, 4}, 255, at::kByte);
    const at::Tensor result = scatter.call(at::ones({1, 2, 4, 4}), offsets, {1, 2, 7, 7}, {3, 3},
                                           {2, 2}, {1, 1}, {1, 1}, last);
    EXPECT_EQ(result.sizes(), (Numbers{1, 2, 7, 7}));
  }
}

}  // namespace
}  // namespace brim::nn
