#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>

namespace brim {

/// How the loss of a batch follows from those of its items.
enum class Reduction : std::uint8_t { mean, sum };

/// What a loss function returns for a part of a batch.
struct PartLoss {
  // NOLINTNEXTLINE(google-explicit-constructor): a loss is one, mostly
  PartLoss(at::Tensor loss) : value(std::move(loss)) {}
  PartLoss(at::Tensor loss, double of) : value(std::move(loss)), count(of) {}

  at::Tensor value;  ///< one element, with its graph

  /// The number of terms that `value` is the mean of, where that is not the batch's items: tokens
  /// that are no padding. May be 0, and then the value does not count. All parts have one, or none
  /// has.
  std::optional<double> count;
};

}  // namespace brim
