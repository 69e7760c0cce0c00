#pragma once

#include <brim/batching/sample_sizes.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "batching/best_fit.h"

namespace brim::batching::detail {

/// Packs samples into as few batches as it can, whatever the budgets. Keeps its workspace.
///
/// One sum: best fit decreasing. One cost of the longest: samples of like size together, the
/// longest first, which wastes least on padding and fills every batch but the last. Several
/// budgets: best fit decreasing by the budget that a sample uses most of.
template <class T>
class BinPacking {
 public:
  /// Keeps a reference to `columns`.
  explicit BinPacking(const Columns<T>& columns) : columns_(columns) {}

  /// @param sizes one a column, sample after sample; each sample fits by itself.
  void pack(std::span<const T> sizes);

  [[nodiscard]] std::size_t bins() const { return loads_.size(); }
  /// Positions of the samples in a bin.
  [[nodiscard]] std::span<const std::uint32_t> members(std::size_t bin) const {
    const std::uint32_t begin = bin == 0 ? 0 : ends_[bin - 1];
    return members_.subspan(begin, ends_[bin] - begin);
  }
  /// Shares of the budget that bins use; of several the fullest.
  [[nodiscard]] const std::vector<double>& loads() const { return loads_; }

 private:
  void pack_sum(std::span<const T> sizes);
  void pack_padded(std::span<const T> sizes);
  void pack_several(std::span<const T> sizes);

  const Columns<T>& columns_;
  BestFitPacker<T> best_fit_;
  std::span<const std::uint32_t> members_;
  std::span<const std::uint32_t> ends_;
  std::vector<double> loads_;
  std::vector<std::uint32_t> own_members_;
  std::vector<std::uint32_t> own_ends_;
};

}  // namespace brim::batching::detail
