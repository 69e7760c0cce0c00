#include <ATen/ops/adaptive_avg_pool1d.h>
#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/adaptive_avg_pool3d.h>
#include <ATen/ops/avg_pool1d.h>
#include <ATen/ops/avg_pool2d.h>
#include <ATen/ops/avg_pool3d.h>
#include <ATen/ops/equal.h>
#include <brim/memory/peak_meter.h>
#include <brim/nn/functional.h>
#include <gtest/gtest.h>

#include <optional>

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

using Divisor = std::optional<std::int64_t>;

struct AvgCase {
  PoolCase base;
  bool count_include_pad = true;
  Divisor divisor;
};

AvgCase next(PoolCases& cases) {
  AvgCase result{cases.next(), cases.between(0, 1) == 1, {}};
  // torch has no avg_pool3d of the half-width types on the CPU.
  if (result.base.dims == 3 && result.base.input.element_size() == 2) {
    result.base.input = result.base.input.to(at::kFloat);
  }
  if (result.base.dims > 1 && cases.between(0, 2) == 0) {
    result.divisor = cases.between(1, 7);
  }
  return result;
}

at::Tensor torchs(const AvgCase& a, const at::Tensor& input) {
  const PoolCase& c = a.base;
  switch (c.dims) {
    case 1:
      return at::avg_pool1d(input, c.kernel, c.stride, c.padding, c.ceil_mode, a.count_include_pad);
    case 2:
      return at::avg_pool2d(input, c.kernel, c.stride, c.padding, c.ceil_mode, a.count_include_pad,
                            a.divisor);
    default:
      return at::avg_pool3d(input, c.kernel, c.stride, c.padding, c.ceil_mode, a.count_include_pad,
                            a.divisor);
  }
}

at::Tensor ours(const AvgCase& a, const at::Tensor& input) {
  const PoolCase& c = a.base;
  return functional::avg_pool(input, c.kernel, c.stride, c.padding, c.ceil_mode,
                              a.count_include_pad, a.divisor);
}

at::Tensor torchs_adaptive(const at::Tensor& input, const Numbers& size) {
  switch (size.size()) {
    case 1:
      return at::adaptive_avg_pool1d(input, size);
    case 2:
      return at::adaptive_avg_pool2d(input, size);
    default:
      return at::adaptive_avg_pool3d(input, size);
  }
}

Numbers output_size(PoolCases& cases, std::size_t dims) {
  Numbers size(dims);
  for (std::int64_t& each : size) {
    each = cases.between(1, 6);
  }
  return size;
}

template <class Ours, class Torchs>
void expect_same(const at::Tensor& numbers, const Ours& pool, const Torchs& reference) {
  const at::Tensor x = leaf(numbers);
  const at::Tensor output = pool(x);
  const at::Tensor expected = reference(x);
  ASSERT_TRUE(same(output, expected));
  EXPECT_EQ(output.strides(), expected.strides());
  const at::Tensor cotangent = normal_like(output);
  EXPECT_TRUE(same(gradient(output, x, cotangent), gradient(expected, x, cotangent)));
}

TEST(AvgPool, EqualsTorchForRandomOptions) {
  PoolCases cases(11);
  for (int i = 0; i < 400; ++i) {
    const AvgCase a = next(cases);
    SCOPED_TRACE(a.base.text());
    expect_same(
        a.base.input, [&](const at::Tensor& x) { return ours(a, x); },
        [&](const at::Tensor& x) { return torchs(a, x); });
  }
}

TEST(AvgPool, KeepsNothing) {
  const at::Tensor x = leaf(normal_numbers({2, 4, 16, 16}, at::kFloat));
  at::Tensor output;
  {
    const PeakMeter meter(at::kCPU);
    output = functional::avg_pool(x, {2, 2});
    EXPECT_EQ(meter.left(), output.numel() * 4);
  }
  const at::Tensor cotangent = normal_like(output);
  const PeakMeter meter(at::kCPU);
  const at::Tensor result = gradient(output, x, cotangent);
  EXPECT_EQ(meter.peak(), result.numel() * 4);
}

TEST(AvgPool, SecondDerivativeEqualsTorchs) {
  PoolCases cases(12);
  for (int i = 0; i < 60; ++i) {
    const AvgCase a = next(cases);
    SCOPED_TRACE(a.base.text());
    const at::Tensor x = leaf(a.base.input.to(at::kDouble));
    const at::Tensor output = ours(a, x);
    const at::Tensor cotangent = leaf(normal_like(output));
    const at::Tensor direction = normal_like(x);
    EXPECT_TRUE(same(gradient(gradient(output, x, cotangent, true), cotangent, direction, true),
                     gradient(gradient(torchs(a, x), x, cotangent, true), cotangent, direction)));
  }
}

TEST(AvgPool, NeedsNoGradientOfWholeNumbers) {
  const at::Tensor x = normal_numbers({1, 1, 4, 4}, at::kFloat).mul(10).to(at::kLong);
  EXPECT_TRUE(at::equal(functional::avg_pool(x, {2, 2}), at::avg_pool2d(x, {2, 2})));
}

TEST(AvgPool, SaysWhatIsWrong) {
  const at::Tensor x = leaf(normal_numbers({2, 3, 8, 8}, at::kFloat));
  EXPECT_CONTAINS(message_of<c10::ValueError>([&] { functional::avg_pool(x, {}); }), "kernel_size");
  EXPECT_CONTAINS(
      message_of<c10::ValueError>([&] { functional::avg_pool(x, {2, 2}, {}, {0, 0, 0}); }),
      "padding");
  EXPECT_CONTAINS(
      message_of<c10::ValueError>([&] { functional::avg_pool(x[0], {2}, {}, {}, false, true, 3); }),
      "divisor_override");
  EXPECT_CONTAINS(
      message_of<c10::Error>([&] { functional::avg_pool(x, {2, 2}, {}, {}, false, true, 0); }),
      "divisor");
}

using BackwardOp = at::Tensor(const at::Tensor&, c10::SymIntArrayRef, at::IntArrayRef,
                              at::IntArrayRef, at::IntArrayRef, bool, bool, Divisor, bool);

TEST(AvgPool, TorchsBackwardWithAStandInGivesTheSame) {
  const auto op = operator_named<BackwardOp>("brim::avg_pool_backward");
  const c10::DispatchKeySet other(c10::DispatchKey::PrivateUse1);
  PoolCases cases(13);
  for (int i = 0; i < 60; ++i) {
    const AvgCase a = next(cases);
    const PoolCase& c = a.base;
    SCOPED_TRACE(c.text());
    const at::Tensor cotangent = normal_like(torchs(a, c.input));
    const auto sizes = c10::fromIntArrayRefSlow(c.input.sizes());
    EXPECT_TRUE(same(op.call(cotangent, sizes, c.kernel, c.stride, c.padding, c.ceil_mode,
                             a.count_include_pad, a.divisor, false),
                     op.redispatch(other, cotangent, sizes, c.kernel, c.stride, c.padding,
                                   c.ceil_mode, a.count_include_pad, a.divisor, false)));
  }
}

TEST(AdaptiveAvgPool, EqualsTorchForRandomSizes) {
  PoolCases cases(14);
  for (int i = 0; i < 400; ++i) {
    const PoolCase c = cases.next();
    const Numbers size = output_size(cases, c.dims);
    SCOPED_TRACE(c.text() + " to " + ::testing::PrintToString(size));
    expect_same(
        c.input, [&](const at::Tensor& x) { return functional::adaptive_avg_pool(x, size); },
        [&](const at::Tensor& x) { return torchs_adaptive(x, size); });
  }
}

TEST(AdaptiveAvgPool, KeepsNothing) {
  const at::Tensor x = leaf(normal_numbers({2, 4, 16, 16}, at::kFloat));
  for (const Numbers& size : {Numbers{1, 1}, Numbers{3, 5}}) {
    at::Tensor output;
    {
      const PeakMeter meter(at::kCPU);
      output = functional::adaptive_avg_pool(x, size);
      EXPECT_EQ(meter.left(), output.numel() * 4);
    }
    const at::Tensor cotangent = normal_like(output);
    const PeakMeter meter(at::kCPU);
    const at::Tensor result = gradient(output, x, cotangent);
    // torch's mean makes a few numbers on the way.
    EXPECT_LE(meter.peak(), result.numel() * 4 + 64);
  }
}

TEST(AdaptiveAvgPool, SecondDerivativeEqualsTorchs) {
  PoolCases cases(15);
  for (int i = 0; i < 60; ++i) {
    const PoolCase c = cases.next();
    const Numbers size = output_size(cases, c.dims);
    SCOPED_TRACE(c.text());
    const at::Tensor x = leaf(c.input.to(at::kDouble));
    const at::Tensor output = functional::adaptive_avg_pool(x, size);
    const at::Tensor cotangent = leaf(normal_like(output));
    const at::Tensor direction = normal_like(x);
    const at::Tensor expected = torchs_adaptive(x, size);
    EXPECT_TRUE(same(gradient(gradient(output, x, cotangent, true), cotangent, direction, true),
                     gradient(gradient(expected, x, cotangent, true), cotangent, direction)));
  }
}

TEST(AdaptiveAvgPool, SaysWhatIsWrong) {
  const at::Tensor x = leaf(normal_numbers({2, 3, 8, 8}, at::kFloat));
  EXPECT_CONTAINS(message_of<c10::ValueError>([&] { functional::adaptive_avg_pool(x, {}); }),
                  "output_size");
  EXPECT_CONTAINS(message_of<c10::Error>([&] { functional::adaptive_avg_pool(x, {-1, 2}); }),
                  "output_size");
}

}  // namespace
}  // namespace brim::nn
