#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/where.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstdint>
#include <limits>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "nn/reference.h"

// Random poolings and the tensors for them.

namespace brim::tests {

using Numbers = std::vector<std::int64_t>;

struct PoolCase {
  std::size_t dims = 2;
  Numbers kernel, stride, padding, dilation;
  bool ceil_mode = false;
  at::Tensor input;

  [[nodiscard]] std::string text() const {
    std::ostringstream out;
    out << "kernel " << at::IntArrayRef(kernel) << " stride " << at::IntArrayRef(stride)
        << " padding " << at::IntArrayRef(padding) << " dilation " << at::IntArrayRef(dilation)
        << " ceil " << ceil_mode << " input " << input.scalar_type() << input.sizes() << " strides "
        << input.strides();
    return out.str();
  }
};

class PoolCases {
 public:
  explicit PoolCases(std::uint32_t seed) : random_(seed) {}

  std::int64_t between(std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(random_);
  }

  PoolCase next() {
    PoolCase result;
    result.dims = static_cast<std::size_t>(between(1, 3));
    Numbers sizes = {between(1, 3), between(1, 2) == 1 ? between(1, 4) : 40};
    for (std::size_t i = 0; i < result.dims; ++i) {
      result.kernel.push_back(between(1, 4));
      result.stride.push_back(between(1, 4));
      result.padding.push_back(between(0, result.kernel[i] / 2));
      result.dilation.push_back(between(1, 3));
      // Long enough for the window, and for torch to find a value in each (see max_pool.cpp).
      const std::int64_t reach = result.dilation[i] * (result.kernel[i] - 1) + 1;
      sizes.push_back(std::max(reach, result.dilation[i]) + between(0, 8));
    }
    result.ceil_mode = between(0, 1) == 1;
    result.input =
        laid_out(normal_numbers(sizes, kFloatingTypes.at(static_cast<std::size_t>(between(0, 3)))));
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

/// Whole numbers: many are equal.
inline at::Tensor with_ties(const at::Tensor& input) { return input.mul(2).round(); }

/// Some NaN, more -inf.
inline at::Tensor with_strange_numbers(const at::Tensor& input) {
  const at::Tensor draw = at::rand(input.sizes());
  const at::Tensor low = at::where(
      draw.lt(0.3), at::full({}, -std::numeric_limits<double>::infinity(), input.options()), input);
  return at::where(draw.gt(0.95),
                   at::full({}, std::numeric_limits<double>::quiet_NaN(), input.options()), low);
}

inline at::Tensor leaf(const at::Tensor& values) { return values.detach().requires_grad_(true); }

/// d(output)/d(input) times `cotangent`.
inline at::Tensor gradient(const at::Tensor& output, const at::Tensor& input,
                           const at::Tensor& cotangent, bool create_graph = false) {
  return torch::autograd::grad({output}, {input}, {cotangent}, true, create_graph)[0];
}

inline at::Tensor normal_like(const at::Tensor& like) {
  return normal_numbers(like.sizes(), like.scalar_type());
}

}  // namespace brim::tests
