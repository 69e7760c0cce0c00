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
/// Sums and counts: best fit decreasing; of several budgets by the one that a sample uses most of.
/// Where a cost is of the longest, samples of like size go together, the longest first, which
/// wastes least on padding.
///
/// Where samples come in a random order, batches must not be the same ones each time. Nothing is
/// padded: most samples are taken as they come, and best fit of the others fills the gaps (Mixing).
/// Padded: who is close in size is fixed. So the first batch is cut short at random, which shifts
/// all others, and now and then a batch is dealt anew together with the samples that follow it: the
/// two then span twice the range of sizes. That adds up to a fifth to the padding. More would not
/// pay: pairs that meet again become fewer only as padding grows.
template <class T>
class BinPacking {
 public:
  /// Keeps a reference to `columns`.
  explicit BinPacking(const Columns<T>& columns);

  /// @param sizes one a column, sample after sample; each sample fits by itself.
  /// @param mixing its seed decides all that is random, and 0 that nothing is.
  void pack(std::span<const T> sizes, const Mixing& mixing = {});

  /// Whether a cost is of the longest, so that Mixing::in_order means nothing.
  [[nodiscard]] bool padded() const { return padded_; }

  [[nodiscard]] std::size_t bins() const { return loads_.size(); }
  /// Positions of the samples in a bin.
  [[nodiscard]] std::span<const std::uint32_t> members(std::size_t bin) const {
    const std::uint32_t begin = bin == 0 ? 0 : ends_[bin - 1];
    return members_.subspan(begin, ends_[bin] - begin);
  }
  /// Shares of the budget that bins use; of several the fullest.
  [[nodiscard]] const std::vector<double>& loads() const { return loads_; }

 private:
  /// How much of its fullest budget each sample uses by itself.
  [[nodiscard]] std::vector<double> shares(std::span<const T> sizes) const;
  void pack_sum(std::span<const T> sizes, const Mixing& mixing);
  void pack_several(std::span<const T> sizes, const Mixing& mixing);
  template <class Fill, class SizeOf, class KeyOf>
  void cut_sorted(Fill fill, const SizeOf& size_of, const KeyOf& key_of, std::uint64_t seed);

  const Columns<T>& columns_;
  bool padded_;
  BestFitPacker<T> best_fit_;
  std::span<const std::uint32_t> members_;
  std::span<const std::uint32_t> ends_;
  std::vector<double> loads_;
  std::vector<std::uint32_t> own_members_;
  std::vector<std::uint32_t> own_ends_;
  std::vector<std::uint32_t> dealt_;
};

}  // namespace brim::batching::detail
