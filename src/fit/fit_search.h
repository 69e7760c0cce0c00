#pragma once

#include <brim/batching/batches.h>
#include <brim/export.h>
#include <brim/fit/fit_batching.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace brim::detail {

/// What the need of a batch may depend on.
struct BatchShape {
  double count = 0;    ///< the number of samples
  double longest = 0;  ///< the largest size
  double total = 0;    ///< the total of the sizes
  double squares = 0;  ///< the total of their squares
  std::size_t epoch = 0;
};

/// The batches of a batching's first epochs, and their shapes.
struct BRIM_API TrialBatches {
  batching::Batches batches;
  std::vector<BatchShape> shapes;

  /// Reads four epochs; fewer of large data sets, and one if the second is the same as the first.
  TrialBatches(const batching::Batching& batching, std::span<const std::int64_t> sizes);
};

/// A limit that was too large is reduced to this share.
inline constexpr double kSmallerLimit = 0.96;

/// What one batch needed.
struct BatchNeed {
  double peak = 0;  ///< bytes, at least 1; if it ran out of memory, the need is more
  bool out_of_memory = false;
};

using MeasureBatch = std::function<BatchNeed(std::span<const std::int64_t>)>;

/// Samples in ascending order of size.
struct BRIM_API SamplesBySize {
  std::vector<std::int64_t> indices;
  std::vector<std::int64_t> sizes;

  explicit SamplesBySize(std::span<const std::int64_t> of);
  /// Where the sizes above `size` begin.
  [[nodiscard]] std::size_t end_of(std::int64_t size) const;
};

/// Finds the limit of a batching: makes it under a trial limit, measures the batches that may need
/// most, learns from them, and tries a smaller or larger limit. Pure logic: measuring is a function
/// that it is given.
struct BRIM_API FitSearch {
  std::span<const std::int64_t> sizes;
  const SamplesBySize& by_size;
  double limit;  ///< bytes
  const MeasureBatch& measure;
  const MakeBatching& make;

  /// Measures extreme batches under `fitted.model`, which learns from those that need more than it
  /// allows, and sets `fitted.maximum`.
  void check_padded(FittedLimit& fitted) const;

  /// The largest total for which no batch can need more than the limit; 0 if not even the smallest
  /// sample fits.
  ///
  /// What a batch needs may depend on more than its total: on its longest sample, on the sum of
  /// squares if attention is inside each sample, on the number of samples. So all batches of some
  /// epochs are bounded (NeedBound), and those with the highest bounds are measured, for totals
  /// that grow until the highest bound is close to the limit.
  /// @throws std::invalid_argument if the work held no memory.
  [[nodiscard]] FittedLimit largest_total() const;

  /// The batches that the batching makes under a limit.
  [[nodiscard]] TrialBatches trial(const FittedLimit& fitted) const {
    return {*make(fitted), sizes};
  }
};

}  // namespace brim::detail
