#pragma once

#include <brim/batching/batches.h>
#include <brim/batching/batching.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace brim::detail {

/// What the need of a batch may depend on.
struct BatchShape {
  double count = 0;    ///< COUNT of samples
  double longest = 0;  ///< the largest size
  double total = 0;    ///< SUM of the sizes
  double squares = 0;  ///< SUM of their squares
  std::size_t epoch = 0;
};

/// The batches of a batching's first epochs, and their shapes.
struct TrialBatches {
  batching::Batches batches;
  std::vector<BatchShape> shapes;

  /// Reads four epochs; fewer of large data sets, and one if the second is the same as the first.
  TrialBatches(const batching::Batching& batching, std::span<const std::int64_t> sizes);
};

}  // namespace brim::detail
