#pragma once

#include <brim/export.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "batching/descending_sort.h"

namespace brim::batching::detail {

/// Orders in which samples that follow each other are alike in several sizes.
///
/// Samples are cut into strips by one size, each with the same share of all cost, and inside every
/// strip into strips by the next size; the last size sorts the samples of a strip, up and down in
/// turn, so that those on both sides of an edge are alike too. With many strips the samples of a
/// batch are alike in the first sizes, with few in the last one. Which number is best depends on
/// how the sizes are distributed and on how many samples a batch holds, so several are tried, and
/// each size as the last one: whatever makes the fewest batches is taken.
///
/// Keeps its workspace between calls. For one thread.
class BRIM_API AlikeOrder {
 public:
  /// Positions of the samples, in the best order that was tried.
  /// @param sizes `width` for each sample, of which `columns` count.
  /// @param share what each sample costs by itself.
  /// @param seed moves the edges of the strips at random; not for 0.
  /// @param batches_of how many batches an order makes, at most `enough`: called with
  ///     `(order, enough)`.
  template <class T, class BatchesOf>
  [[nodiscard]] std::vector<std::uint32_t> best(std::span<const T> sizes, std::size_t width,
                                                std::span<const std::size_t> columns,
                                                std::span<const double> share, DescendingSort& sort,
                                                std::uint64_t seed, const BatchesOf& batches_of) {
    const std::size_t count = share.size();
    sorted_.resize(columns.size());
    std::vector<T> column(count);
    for (std::size_t c = 0; c < columns.size(); ++c) {
      for (std::size_t i = 0; i < count; ++i) {
        column[i] = sizes[i * width + columns[c]];
      }
      sort(std::span<const T>(column), sorted_[c]);
    }
    std::vector<std::uint32_t> order;
    sort(share, order);
    std::vector<std::uint32_t> best = order;
    std::size_t fewest = batches_of(order, count + 1);
    for (std::size_t last = 0; last < columns.size(); ++last) {
      std::size_t before = count + 1;
      std::size_t more = 0;  // how many times in a row more strips made no fewer batches
      for (std::size_t strips = 1; strips <= fewest && more < 2; strips = next(strips)) {
        arrange(last, strips, share, seed, order);
        const std::size_t batches = batches_of(order, 2 * fewest);
        if (batches < fewest) {
          fewest = batches;
          best = order;
        }
        more = batches < before ? 0 : more + 1;
        before = batches;
      }
    }
    return best;
  }

 private:
  // 1, 2, 3, 4, 6, 8, 12, …
  static std::size_t next(std::size_t strips) {
    return strips < 2 ? 2 : (strips & (strips - 1)) == 0 ? strips + strips / 2 : strips / 3 * 4;
  }

  void arrange(std::size_t last, std::size_t strips, std::span<const double> share,
               std::uint64_t seed, std::vector<std::uint32_t>& order);

  std::vector<std::vector<std::uint32_t>> sorted_;  // positions by each size, the largest first
  std::vector<std::uint32_t> strip_;                // of each sample
  std::vector<std::uint32_t> starts_;
  std::vector<double> totals_;
  std::vector<double> passed_;
};

}  // namespace brim::batching::detail
