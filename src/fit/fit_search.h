#pragma once

#include <brim/export.h>
#include <brim/fit/fit_batching.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "fit/trial_batches.h"

namespace brim::detail {

/// What one batch needed.
struct BatchNeed {
  double peak = 0;  ///< bytes, at least 1; if it ran out of memory, the need is more
  bool out_of_memory = false;
};

using MeasureBatch = std::function<BatchNeed(std::span<const std::int64_t>)>;

/// Samples in ascending order of size.
struct SamplesBySize {
  std::vector<std::int64_t> indices;
  std::vector<std::int64_t> sizes;

  explicit SamplesBySize(std::span<const std::int64_t> of);
  /// Where the sizes above `size` begin.
  [[nodiscard]] std::size_t end_of(std::int64_t size) const;
};

/// Finds the limit of a batching: makes it under a trial limit, measures the batches that may need
/// most, learns from them, and tries a smaller or larger limit. Pure logic: measuring is a function
/// that it is given.
class BRIM_API FitSearch {
 public:
  /// Keeps references to everything but the numbers.
  FitSearch(std::span<const std::int64_t> sizes, const SamplesBySize& by_size, std::int64_t limit,
            const MeasureBatch& measure, const MakeBatching& make)
      : sizes_(sizes),
        by_size_(by_size),
        limit_(static_cast<double>(limit)),
        measure_(measure),
        make_(make) {}

  /// Measures extreme batches under `fitted.model`, which learns from those that need more than it
  /// allows, and sets `fitted.maximum`.
  void check_padded(FittedLimit& fitted);

  /// The largest total for which no batch can need more than the limit; 0 if not even the smallest
  /// sample fits.
  ///
  /// What a batch needs may depend on more than its total: on its longest sample, on the sum of
  /// squares if attention is inside each sample, on the number of samples. So all batches of some
  /// epochs are bounded (NeedBound), and those with the highest bounds are measured, for totals
  /// that grow until the highest bound is close to the limit.
  /// @throws std::invalid_argument if the work held no memory.
  [[nodiscard]] FittedLimit largest_total();

  /// The batches that the batching makes under a limit.
  [[nodiscard]] TrialBatches trial(const FittedLimit& fitted) const {
    return {*make_(fitted), sizes_};
  }

 private:
  class TotalSearch;

  std::span<const std::int64_t> sizes_;
  const SamplesBySize& by_size_;
  double limit_;
  const MeasureBatch& measure_;
  const MakeBatching& make_;
};

}  // namespace brim::detail
