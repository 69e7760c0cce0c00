#pragma once

#include <brim/batching/batching.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "batching/batch_fill.h"
#include "batching/permutation.h"
#include "check_argument.h"

namespace brim::batching::detail {

using brim::detail::check_argument;

/// The largest of the sizes, 0 if there are none. @throws std::invalid_argument naming the index of
/// one that is negative, NaN or infinite.
template <class T>
[[nodiscard]] T largest_size(const SizeSpan<T>& sizes);

/// @throws std::invalid_argument unless there is a column, and all are equally and not too long.
template <class T>
void check_lengths(const Columns<T>& columns);

/// Checked sizes, and the samples among them that fit a budget, in the order asked for.
template <class T>
class SampleTable {
 public:
  SampleTable(Columns<T> columns, const Order& order, Oversize oversize)
      : columns_(std::move(columns)), indices_(order.indices), shuffle_(order.shuffle) {
    check_lengths(columns_);
    // Costs grow with the size: if the largest size fits, all do.
    const bool all_fit = std::all_of(columns_.begin(), columns_.end(), [](const Column<T>& column) {
      return fits_alone(column.limit, largest_size(column.sizes));
    });
    check_indices();
    given_ = indices_ ? static_cast<std::int64_t>(indices_->size())
                      : static_cast<std::int64_t>(columns_[0].sizes.size());
    if (!all_fit) {
      alone_ = oversize == Oversize::alone;
      if (oversize == Oversize::truncate) {
        truncate();
      } else if (!alone_) {
        keep_what_fits(oversize);
      }
    }
  }

  [[nodiscard]] const Columns<T>& columns() const { return columns_; }
  [[nodiscard]] std::int64_t given() const { return given_; }
  /// COUNT of samples to be batched.
  [[nodiscard]] std::int64_t size() const {
    return given_ - static_cast<std::int64_t>(left_out_.size());
  }
  [[nodiscard]] const std::vector<LeftOut>& left_out() const { return left_out_; }
  [[nodiscard]] bool shuffled() const { return shuffle_; }
  /// Whether samples may exceed the budget by themselves; each is then in a batch of its own.
  [[nodiscard]] bool has_oversize() const { return alone_; }

  [[nodiscard]] Permutation permutation(std::uint64_t seed) const {
    return shuffle_ ? Permutation(static_cast<std::uint64_t>(size()), seed) : Permutation();
  }

  /// All samples are there.
  static void look_ahead(std::int64_t /*samples*/) {}
  [[nodiscard]] bool has(std::int64_t sample) const {
    return sample >= 0 && std::cmp_less(sample, columns_[0].sizes.size());
  }

  /// The indices of samples first, first + 1, … of the epoch with this permutation.
  void read(const Permutation& permutation, std::int64_t first, std::span<std::int64_t> out) const {
    if (shuffle_) {
      permutation.read(static_cast<std::uint64_t>(first), out);
      if (indices_) {
        for (std::int64_t& index : out) {
          index = (*indices_)[static_cast<std::size_t>(index)];
        }
      }
    } else if (indices_) {
      std::copy_n(indices_->begin() + first, out.size(), out.begin());
    } else {
      for (std::size_t i = 0; i < out.size(); ++i) {  // vectorized, unlike GCC's std::iota
        out[i] = first + static_cast<std::int64_t>(i);
      }
    }
  }

  /// The sizes of all samples from `first` on if they are contiguous in memory, else null.
  [[nodiscard]] const T* contiguous(std::int64_t first) const {
    const T* const stored = columns_[0].sizes.data();
    return shuffle_ || indices_ || columns_.size() > 1 || stored == nullptr ? nullptr
                                                                            : stored + first;
  }

  /// Sizes of these samples, sample after sample with all its columns.
  void gather(std::span<const std::int64_t> samples, std::vector<T>& sizes) const {
    sizes.resize(samples.size() * columns_.size());
    gather(samples, std::span(sizes));
  }
  void gather(std::span<const std::int64_t> samples, std::span<T> sizes) const {
    if (columns_.size() == 1) {
      // With a constant step the compiler makes a better loop.
      gather_column(columns_[0], samples, sizes.data(), std::integral_constant<std::size_t, 1>());
      return;
    }
    for (std::size_t c = 0; c < columns_.size(); ++c) {
      gather_column(columns_[c], samples, sizes.data() + c, columns_.size());
    }
  }

  [[nodiscard]] BatchFigures figures(std::span<const std::int64_t> batch) const {
    MultiFill<T> fill(columns_);
    std::vector<T> sizes;
    gather(batch, sizes);
    BatchFigures result;
    double longest = 0.0;
    for (std::size_t i = 0; i < sizes.size(); i += columns_.size()) {
      fill.add(sizes.data() + i);
      result.sizes += static_cast<double>(sizes[i]);
      longest = std::max(longest, static_cast<double>(sizes[i]));
    }
    result.load = fill.load();
    result.work = result.load;
    result.padded = static_cast<double>(batch.size()) * longest;
    return result;
  }

 private:
  // A loop of nothing but loads: each misses the cache, and many can be in flight at once.
  template <class Step>
  static void gather_column(const Column<T>& column, std::span<const std::int64_t> samples, T* to,
                            Step step) {
    column.sizes.visit([=](auto stored) {
      const auto* const from = stored.data();
      for (T* out = to; const std::int64_t sample : samples) {
        *out = static_cast<T>(from[sample]);  // NOLINT(bugprone-signed-char-misuse): a number
        out += step;
      }
    });
  }

  void check_indices() const {
    if (!indices_) {
      return;
    }
    const auto samples = static_cast<std::int64_t>(columns_[0].sizes.size());
    const auto outside = std::find_if(indices_->begin(), indices_->end(), [&](std::int64_t index) {
      return index < 0 || index >= samples;
    });
    if (outside != indices_->end()) {
      check_argument(false, "indices must be from 0 to ", samples - 1,
                     ", the samples that have a size, got ", *outside, " at place ",
                     outside - indices_->begin());
    }
  }

  void truncate() {
    for (Column<T>& column : columns_) {
      const T largest = largest_fitting_size<T>(column.limit);
      std::vector<T>& own = truncated_.emplace_back(column.sizes.size());
      column.sizes.visit([&](auto stored) {
        std::transform(stored.begin(), stored.end(), own.begin(),
                       [=](auto size) { return std::min(static_cast<T>(size), largest); });
      });
      column.sizes = own;
    }
  }

  void keep_what_fits(Oversize oversize) {
    kept_.reserve(static_cast<std::size_t>(given_));
    for (std::int64_t i = 0; i < given_; ++i) {
      const std::int64_t sample = indices_ ? (*indices_)[static_cast<std::size_t>(i)] : i;
      const auto over =
          std::find_if(columns_.begin(), columns_.end(), [&](const Column<T>& column) {
            const T size = column.sizes[static_cast<std::size_t>(sample)];
            return !fits_alone(column.limit, size);
          });
      if (over == columns_.end()) {
        kept_.push_back(sample);
      } else {
        check_argument(oversize != Oversize::error, "sample ", sample,
                       " exceeds the budget by itself: its size is ",
                       over->sizes[static_cast<std::size_t>(sample)], ", max_total_size is ",
                       maximum_of<T>(over->limit));
        left_out_.push_back({sample, LeftOutReason::over_budget});
      }
    }
    indices_ = kept_;
  }

  Columns<T> columns_;
  std::optional<std::span<const std::int64_t>> indices_;
  bool shuffle_;
  std::int64_t given_ = 0;
  bool alone_ = false;
  std::deque<std::vector<T>> truncated_;  // sizes of columns, if some are truncated
  std::vector<std::int64_t> kept_;
  std::vector<LeftOut> left_out_;
};

/// The part of a Batching that its table of samples answers.
template <class T>
class TableBatching : public Batching {
 public:
  TableBatching(Columns<T> columns, const Order& order, Oversize oversize)
      : table_(std::move(columns), order, oversize) {}

  [[nodiscard]] std::int64_t samples() const override { return table_.given(); }
  [[nodiscard]] const std::vector<LeftOut>& left_out() const override { return table_.left_out(); }
  [[nodiscard]] BatchFigures figures(std::span<const std::int64_t> batch) const override {
    return table_.figures(batch);
  }

 protected:
  [[nodiscard]] const SampleTable<T>& table() const { return table_; }

 private:
  SampleTable<T> table_;
};

}  // namespace brim::batching::detail
