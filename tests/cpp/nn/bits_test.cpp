#include "nn/ops/bits.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <brim/nn/functional.h>
#include <gtest/gtest.h>

#include <limits>

#include "nn/reference.h"

namespace brim::nn {
namespace {

using tests::kFloatingTypes;
using tests::normal_numbers;
using tests::same;

constexpr double kInf = std::numeric_limits<double>::infinity();

at::Tensor pack(const at::Tensor& mask) {
  static const auto op = tests::operator_named<at::Tensor(const at::Tensor&)>("brim::pack_bits");
  return op.call(mask);
}

at::Tensor apply(const at::Tensor& input, const at::Tensor& bits, at::IntArrayRef strides,
                 double on, double off) {
  static const auto op =
      tests::operator_named<at::Tensor(const at::Tensor&, const at::Tensor&, c10::SymIntArrayRef,
                                       double, double)>("brim::apply_bits");
  return op.call(input, bits, c10::fromIntArrayRefSlow(strides), on, off);
}

/// One element after the other, in the order of memory.
at::Tensor reference_bits(const at::Tensor& mask) {
  const at::Tensor flags = mask.as_strided({mask.numel()}, {1}).ne(0);
  at::Tensor bits = at::zeros({(mask.numel() + 7) / 8}, at::TensorOptions().dtype(at::kByte));
  const bool* const from = flags.const_data_ptr<bool>();
  auto* const to = bits.mutable_data_ptr<std::uint8_t>();
  for (std::int64_t i = 0; i < mask.numel(); ++i) {
    to[i / 8] = static_cast<std::uint8_t>(to[i / 8] | (from[i] ? 1U << (i % 8) : 0U));
  }
  return bits;
}

/// Products, but for factors of 0 and 1.
at::Tensor reference_apply(const at::Tensor& input, const at::Tensor& mask, double on, double off) {
  const auto times = [&](double factor) {
    return factor == 0.0 ? input.new_zeros({}) : factor == 1.0 ? input : input.mul(factor);
  };
  return at::where(mask, times(on), times(off));
}

at::Tensor random_mask(at::IntArrayRef sizes) {
  return at::rand(sizes, at::TensorOptions().dtype(at::kFloat)).lt(0.5);
}

TEST(PackBits, EverySizeAndTypeGivesOneBitAnElementAndZerosAfterTheLast) {
  for (std::int64_t n = 0; n <= 200; ++n) {
    const at::Tensor mask = random_mask({n});
    const at::Tensor expected = reference_bits(mask);
    EXPECT_TRUE(pack(mask).equal(expected)) << "bool, " << n;
    EXPECT_TRUE(pack(mask.to(at::kByte).mul(7)).equal(expected)) << "uint8, " << n;
    for (const at::ScalarType type : kFloatingTypes) {
      EXPECT_TRUE(pack(mask.to(type).mul(-0.25)).equal(expected)) << type << ", " << n;
    }
  }
}

TEST(PackBits, MinusZeroIsZeroAndNaNIsNot) {
  for (const at::ScalarType type : kFloatingTypes) {
    const auto options = at::TensorOptions().dtype(type);
    EXPECT_EQ(pack(at::full({3}, -0.0, options)).item<int>(), 0) << type;
    EXPECT_EQ(pack(at::full({3}, std::numeric_limits<double>::quiet_NaN(), options)).item<int>(), 7)
        << type;
    EXPECT_EQ(pack(at::full({3}, -kInf, options)).item<int>(), 7) << type;
  }
}

TEST(PackBits, WorkSharedAmongThreadsGivesTheSame) {
  for (const std::int64_t n : {65536, 100003, 262145}) {
    const at::Tensor mask = random_mask({n});
    EXPECT_TRUE(pack(mask).equal(reference_bits(mask))) << n;
  }
}

TEST(ApplyBits, EverySizeTypeAndPairOfFactorsChoosesByTheBit) {
  for (const at::ScalarType type : kFloatingTypes) {
    for (std::int64_t n = 0; n <= 200; ++n) {
      const at::Tensor mask = random_mask({n});
      const at::Tensor input = normal_numbers({n}, type);
      for (const auto& [on, off] : {std::pair(1.0, 0.0), std::pair(1.25, 0.0), std::pair(1.0, 0.01),
                                    std::pair(-3.0, 0.1), std::pair(0.0, 1.0)}) {
        EXPECT_TRUE(same(apply(input, reference_bits(mask), {1}, on, off),
                         reference_apply(input, mask, on, off)))
            << type << ", " << n << ", " << on << ", " << off;
      }
    }
  }
}

TEST(ApplyBits, WorkSharedAmongThreadsGivesTheSame) {
  for (const at::ScalarType type : kFloatingTypes) {
    for (const std::int64_t n : {65536, 100003}) {
      const at::Tensor mask = random_mask({n});
      const at::Tensor input = normal_numbers({n}, type);
      EXPECT_TRUE(same(apply(input, reference_bits(mask), {1}, 1.5, 0.0),
                       reference_apply(input, mask, 1.5, 0.0)))
          << type << ", " << n;
    }
  }
}

TEST(ApplyBits, AFactorOfZeroGivesZeroForInfAndNaN) {
  for (const at::ScalarType type : kFloatingTypes) {
    at::Tensor input = normal_numbers({130}, type);
    input.slice(0, 0, 130, 2).fill_(kInf);
    input.slice(0, 1, 130, 3).fill_(std::numeric_limits<double>::quiet_NaN());
    const at::Tensor none = at::zeros({17}, at::TensorOptions().dtype(at::kByte));
    EXPECT_TRUE(apply(input, none, {1}, 1.5, 0.0).eq(0).all().item<bool>()) << type;
    EXPECT_TRUE(apply(input, none.bitwise_not(), {1}, 0.0, 1.5).eq(0).all().item<bool>()) << type;
    EXPECT_TRUE(same(apply(input, none, {1}, 0.0, 1.0), input)) << type;
  }
}

TEST(ApplyBits, BitsFollowTheMemoryOfTheTensorThatTheyWereMadeFor) {
  for (const auto& [name, made_for] : tests::layouts(at::kFloat)) {
    if (!made_for.is_non_overlapping_and_dense()) {
      continue;  // whoever packs makes it dense first
    }
    const at::Tensor bits = pack(made_for.relu());
    for (const auto& [other, input] : tests::layouts(at::kFloat)) {
      if (input.sizes() != made_for.sizes()) {
        continue;
      }
      const at::Tensor output = apply(input, bits, made_for.strides(), 2.0, 0.5);
      EXPECT_TRUE(same(output, reference_apply(input, made_for.gt(0), 2.0, 0.5)))
          << name << " to " << other;
      EXPECT_EQ(output.strides(), made_for.strides()) << name << " to " << other;
    }
  }
}

TEST(ApplyBits, AlignmentDoesNotMatter) {
  for (const at::ScalarType type : kFloatingTypes) {
    const at::Tensor all = normal_numbers({203}, type);
    const at::Tensor input = all.narrow(0, 3, 200);
    const at::Tensor mask = random_mask({200});
    EXPECT_TRUE(same(apply(input, reference_bits(mask), {1}, 3.0, 0.0),
                     reference_apply(input, mask, 3.0, 0.0)))
        << type;
  }
}

}  // namespace
}  // namespace brim::nn
