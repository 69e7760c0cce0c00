#include <ATen/ops/adaptive_avg_pool1d.h>
#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/adaptive_avg_pool3d.h>
#include <ATen/ops/avg_pool1d.h>
#include <ATen/ops/avg_pool2d.h>
#include <ATen/ops/avg_pool3d.h>
#include <ATen/ops/full.h>
#include <ATen/ops/max_pool1d_with_indices.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/max_pool2d_with_indices.h>
#include <ATen/ops/max_pool3d_with_indices.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/where.h>
#include <brim/memory/peak_meter.h>
#include <brim/nn/functional.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>

#include <functional>
#include <limits>
#include <optional>
#include <ostream>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "nn/ops/pool.h"
#include "nn/reference.h"
#include "tensors.h"

// Random options, sizes and layouts; bytes; the operators below the functions.

namespace brim::nn {
namespace {

using tests::message_of;
using tests::normal_numbers;
using tests::operator_named;
using tests::same;

using Numbers = std::vector<std::int64_t>;
using TwoTensors = std::tuple<at::Tensor, at::Tensor>;

struct Case {
  std::size_t dims = 2;
  Numbers kernel, stride, padding, dilation, output_size;
  bool ceil_mode = false;
  bool count_include_pad = true;
  std::optional<std::int64_t> divisor;
  at::Tensor input;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << "kernel " << at::IntArrayRef(c.kernel) << " stride " << at::IntArrayRef(c.stride)
             << " padding " << at::IntArrayRef(c.padding) << " dilation "
             << at::IntArrayRef(c.dilation) << " ceil " << c.ceil_mode << " output "
             << at::IntArrayRef(c.output_size) << " divisor " << c.divisor.value_or(0) << " input "
             << c.input.scalar_type() << c.input.sizes() << " strides " << c.input.strides();
}

class Cases {
 public:
  explicit Cases(std::uint32_t seed) : random_(seed) {}

  std::int64_t between(std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(random_);
  }

  Case next() {
    Case result;
    result.dims = static_cast<std::size_t>(between(1, 3));
    Numbers sizes = {between(1, 3), between(1, 2) == 1 ? between(1, 4) : 40};
    for (std::size_t i = 0; i < result.dims; ++i) {
      result.kernel.push_back(between(1, 4));
      result.stride.push_back(between(1, 4));
      result.padding.push_back(between(0, result.kernel[i] / 2));
      result.dilation.push_back(between(1, 3));
      result.output_size.push_back(between(1, 6));
      // Long enough for the window, and for torch to find a value in each.
      const std::int64_t reach = result.dilation[i] * (result.kernel[i] - 1) + 1;
      sizes.push_back(std::max(reach, result.dilation[i]) + between(0, 8));
    }
    result.ceil_mode = between(0, 1) == 1;
    result.count_include_pad = between(0, 1) == 1;
    if (result.dims > 1 && between(0, 2) == 0) {
      result.divisor = between(1, 7);
    }
    const auto type = tests::kFloatingTypes.at(static_cast<std::size_t>(between(0, 3)));
    result.input = laid_out(normal_numbers(sizes, type));
    return result;
  }

 private:
  at::Tensor laid_out(const at::Tensor& plain) {
    switch (between(0, 3)) {
      case 0:
        return plain;
      case 1:  // channels last
        return plain.movedim(1, -1).contiguous().movedim(-1, 1);
      case 2:  // neither
        return plain.movedim(-1, 0).contiguous().movedim(0, -1);
      default:  // no batch
        return plain[0];
    }
  }

  std::mt19937 random_;
};

at::Tensor leaf(const at::Tensor& values) { return values.detach().requires_grad_(true); }

at::Tensor gradient(const at::Tensor& output, const at::Tensor& input,
                    const at::Tensor& cotangent) {
  return torch::autograd::grad({output}, {input}, {cotangent})[0];
}

at::Tensor normal_like(const at::Tensor& like) {
  return normal_numbers(like.sizes(), like.scalar_type());
}

template <class Pool>
auto ours(const Pool& pool, const Case& c, const at::Tensor& x) {
  return pool(x, c.kernel, c.stride, c.padding, c.dilation, c.ceil_mode);
}

TwoTensors torchs_max_pool(const Case& c, const at::Tensor& x) {
  const auto of = [&](const auto& pool) { return ours(pool, c, x); };
  return c.dims == 1   ? of([](auto&&... a) { return at::max_pool1d_with_indices(a...); })
         : c.dims == 2 ? of([](auto&&... a) { return at::max_pool2d_with_indices(a...); })
                       : of([](auto&&... a) { return at::max_pool3d_with_indices(a...); });
}

at::Tensor torchs_avg_pool(const Case& c, const at::Tensor& x) {
  if (c.dims == 1) {
    return at::avg_pool1d(x, c.kernel, c.stride, c.padding, c.ceil_mode, c.count_include_pad);
  }
  auto* const pool = c.dims == 2 ? &at::avg_pool2d : &at::avg_pool3d;
  return pool(x, c.kernel, c.stride, c.padding, c.ceil_mode, c.count_include_pad, c.divisor);
}

at::Tensor torchs_adaptive(const Case& c, const at::Tensor& x) {
  return c.dims == 1   ? at::adaptive_avg_pool1d(x, c.output_size)
         : c.dims == 2 ? at::adaptive_avg_pool2d(x, c.output_size)
                       : at::adaptive_avg_pool3d(x, c.output_size);
}

template <class Ours, class Torchs>
void expect_same(const Case& c, const at::Tensor& numbers, const Ours& pool,
                 const Torchs& reference) {
  const at::Tensor x = leaf(numbers);
  const at::Tensor output = pool(x);
  const at::Tensor expected = reference(x);
  ASSERT_TRUE(same(output, expected)) << c;
  EXPECT_EQ(output.strides(), expected.strides()) << c;
  const at::Tensor cotangent = normal_like(output);
  EXPECT_TRUE(same(gradient(output, x, cotangent), gradient(expected, x, cotangent))) << c;
}

void expect_max_pool_as_torch(const Case& c, const at::Tensor& numbers) {
  const auto torchs = torchs_max_pool(c, numbers);
  expect_same(
      c, numbers,
      [&](const at::Tensor& x) {
        return ours([](auto&&... a) { return functional::max_pool(a...); }, c, x);
      },
      [&](const at::Tensor& x) { return std::get<0>(torchs_max_pool(c, x)); });
  expect_same(
      c, numbers,
      [&](const at::Tensor& x) {
        const auto [output, indices] =
            ours([](auto&&... a) { return functional::max_pool_with_indices(a...); }, c, x);
        EXPECT_TRUE(indices.equal(std::get<1>(torchs))) << c;
        EXPECT_FALSE(indices.requires_grad());
        return output;
      },
      [&](const at::Tensor& x) { return std::get<0>(torchs_max_pool(c, x)); });
}

TEST(MaxPool, EqualsTorchForRandomOptions) {
  Cases cases(1);
  for (int i = 0; i < 200; ++i) {
    const Case c = cases.next();
    expect_max_pool_as_torch(c, c.input);
    expect_max_pool_as_torch(c, c.input.mul(2).round());  // many equal values
  }
}

/// Some NaN, more -inf.
at::Tensor with_special_numbers(const at::Tensor& input) {
  using Limits = std::numeric_limits<double>;
  const at::Tensor draw = at::rand(input.sizes());
  const at::Tensor low =
      at::where(draw.lt(0.3), at::full({}, -Limits::infinity(), input.options()), input);
  return at::where(draw.gt(0.95), at::full({}, Limits::quiet_NaN(), input.options()), low);
}

/// torch 2.11 to 2.15 misplace the maximum of a window of -inf in the last channels of
/// channels_last_3d, outside of the window; elsewhere they take the window's first.
bool torch_misplaces(const Case& c) {
  return c.input.dim() == 5 && c.input.suggest_memory_format() != at::MemoryFormat::Contiguous;
}

TEST(MaxPool, TreatsNanAndInfinityAsTorch) {
  Cases cases(3);
  for (int i = 0; i < 200; ++i) {
    const Case c = cases.next();
    if (!torch_misplaces(c)) {
      expect_max_pool_as_torch(c, with_special_numbers(c.input));
    }
  }
}

TEST(AvgPool, EqualsTorchForRandomOptions) {
  Cases cases(11);
  for (int i = 0; i < 400; ++i) {
    Case c = cases.next();
    if (c.dims == 3 && c.input.element_size() == 2) {
      c.input = c.input.to(at::kFloat);  // torch has no kernel for it
    }
    expect_same(
        c, c.input,
        [&](const at::Tensor& x) {
          return functional::avg_pool(x, c.kernel, c.stride, c.padding, c.ceil_mode,
                                      c.count_include_pad, c.divisor);
        },
        [&](const at::Tensor& x) { return torchs_avg_pool(c, x); });
  }
}

TEST(AdaptiveAvgPool, EqualsTorchForRandomSizes) {
  Cases cases(14);
  for (int i = 0; i < 400; ++i) {
    const Case c = cases.next();
    expect_same(
        c, c.input,
        [&](const at::Tensor& x) { return functional::adaptive_avg_pool(x, c.output_size); },
        [&](const at::Tensor& x) { return torchs_adaptive(c, x); });
  }
}

TEST(MaxPool, LeavesWindowsOfMoreThan256PlacesToTorch) {
  const at::Tensor x = leaf(normal_numbers({1, 2, 40, 40}, at::kFloat));
  EXPECT_EQ(functional::max_pool(x, {17, 16}).grad_fn()->name(), "MaxPool2DWithIndicesBackward0");
  EXPECT_EQ(functional::max_pool(x, {16, 16}).grad_fn()->name(), "brim::max_pool_backward");
}

/// Bytes left after forward per output element, and the peak of backward per input element.
std::pair<std::int64_t, std::int64_t> bytes(
    const at::Tensor& x, const std::function<at::Tensor(const at::Tensor&)>& pool) {
  at::Tensor output;
  std::int64_t left = 0;
  {
    const PeakMeter meter(at::kCPU);
    output = pool(x);
    left = meter.left();
    EXPECT_EQ(meter.peak(), left);
  }
  const at::Tensor cotangent = at::randn_like(output);
  const PeakMeter meter(at::kCPU);
  const at::Tensor result = gradient(output, x, cotangent);
  return {left / output.numel(), meter.peak() / result.numel()};
}

TEST(Pools, KeepAndNeedNoMoreThanTheyMust) {
  using Bytes = std::pair<std::int64_t, std::int64_t>;
  for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
    const at::Tensor input = leaf(normal_numbers({2, 16, 32, 32}, at::kFloat).contiguous(format));
    EXPECT_EQ(
        bytes(input,
              [](const at::Tensor& x) { return functional::max_pool(x, {3, 3}, {2, 2}, {1, 1}); }),
        Bytes(4 + 1, 4));
    EXPECT_EQ(bytes(input, [](const at::Tensor& x) { return functional::avg_pool(x, {2, 2}); }),
              Bytes(4, 4));
    EXPECT_EQ(
        bytes(input, [](const at::Tensor& x) { return functional::adaptive_avg_pool(x, {3, 5}); }),
        Bytes(4, 4));
  }
}

TEST(Pools, SayWhatIsWrong) {
  const at::Tensor x = leaf(normal_numbers({2, 3, 8, 8}, at::kFloat));
  const auto said = [](const auto& work) { return message_of<c10::ValueError>(work); };
  EXPECT_CONTAINS(said([&] { functional::max_pool(x, {}); }), "kernel_size");
  EXPECT_CONTAINS(said([&] { functional::max_pool(x, {2, 2, 2, 2}); }), "[2, 2, 2, 2]");
  EXPECT_CONTAINS(said([&] { functional::max_pool(x, {2, 2}, {1, 1, 1}); }), "stride");
  EXPECT_CONTAINS(said([&] { functional::avg_pool(x, {}); }), "kernel_size");
  EXPECT_CONTAINS(said([&] { functional::avg_pool(x, {2, 2}, {}, {0, 0, 0}); }), "padding");
  EXPECT_CONTAINS(said([&] { functional::avg_pool(x[0], {2}, {}, {}, false, true, 3); }),
                  "divisor_override");
  EXPECT_CONTAINS(said([&] { functional::adaptive_avg_pool(x, {}); }), "output_size");
  EXPECT_CONTAINS(message_of<c10::Error>([&] { functional::adaptive_avg_pool(x, {-1, 2}); }),
                  "output_size");
  EXPECT_CONTAINS(
      message_of<c10::Error>([&] { functional::avg_pool(x, {2, 2}, {}, {}, false, true, 0); }),
      "divisor");
  EXPECT_CONTAINS(message_of<c10::Error>([&] { functional::max_pool(x[0][0], {2, 2}); }), "3D");
}

TEST(MaxPool, RefusesInTorchsWords) {
  const at::Tensor x = leaf(normal_numbers({2, 3, 8, 8}, at::kFloat));
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
}

// -- The operators below -------------------------------------------------------------------------

using PackOp = TwoTensors(const at::Tensor&, at::IntArrayRef, bool);
using ScatterOp = at::Tensor(const at::Tensor&, const at::Tensor&, c10::SymIntArrayRef,
                             at::IntArrayRef, bool);

PoolWindow window_of(const Case& c) { return {c.kernel, c.stride, c.padding, c.dilation}; }

// A backend without kernels of ours.
constexpr c10::DispatchKeySet kOther(c10::DispatchKey::PrivateUse1);

TEST(MaxPoolOperators, OfATenGiveTheSame) {
  const auto pack = operator_named<PackOp>("brim::max_pool_pack");
  const auto scatter = operator_named<ScatterOp>("brim::max_pool_scatter");
  Cases cases(5);
  for (int i = 0; i < 100; ++i) {
    const Case c = cases.next();
    const PoolWindow window = window_of(c);
    const auto [output, offsets] = pack.call(c.input, window.numbers(), c.ceil_mode);
    const auto [expected, expected_offsets] =
        pack.redispatch(kOther, c.input, window.numbers(), c.ceil_mode);
    EXPECT_TRUE(same(output, expected)) << c;
    EXPECT_TRUE(offsets.equal(expected_offsets)) << c;
    EXPECT_EQ(offsets.strides(), expected_offsets.strides()) << c;
    const at::Tensor cotangent = normal_like(output).to(at::kDouble);
    const auto sizes = c10::fromIntArrayRefSlow(c.input.sizes());
    const bool channels_last = offsets.dim() > 2 && !offsets.is_contiguous();
    EXPECT_TRUE(at::allclose(
        scatter.call(cotangent, offsets, sizes, window.numbers(), channels_last),
        scatter.redispatch(kOther, cotangent, offsets, sizes, window.numbers(), channels_last),
        1e-12, 1e-12))
        << c;
  }
}

TEST(MaxPoolOperators, OfMetaTensorsGiveTheStridesOfRealOnes) {
  const auto pack = operator_named<PackOp>("brim::max_pool_pack");
  Cases cases(6);
  for (int i = 0; i < 100; ++i) {
    const Case c = cases.next();
    const PoolWindow window = window_of(c);
    const auto [output, offsets] = pack.call(c.input, window.numbers(), c.ceil_mode);
    const auto [meta, meta_offsets] =
        pack.call(c.input.to(at::kMeta), window.numbers(), c.ceil_mode);
    EXPECT_EQ(meta.sizes(), output.sizes()) << c;
    EXPECT_EQ(meta.strides(), output.strides()) << c;
    EXPECT_EQ(meta_offsets.strides(), offsets.strides()) << c;
    EXPECT_EQ(meta_offsets.scalar_type(), at::kByte) << c;
  }
}

TEST(MaxPoolOperators, OffsetsThatPointNowhereDoNoHarm) {
  const auto scatter = operator_named<ScatterOp>("brim::max_pool_scatter");
  for (const bool last : {false, true}) {
    const at::Tensor offsets = at::full({1, 2, 4, 4}, 255, at::kByte);
    const at::Tensor result =
        scatter.call(at::ones({1, 2, 4, 4}), offsets, {1, 2, 7, 7}, {3, 3, 2, 2, 1, 1, 1, 1}, last);
    EXPECT_EQ(result.sizes(), (Numbers{1, 2, 7, 7}));
  }
}

}  // namespace
}  // namespace brim::nn
