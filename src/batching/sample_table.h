#pragma once

#include <brim/batching/batching.h>
#include <brim/batching/interruption.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
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
        for (const Column<T>& column : columns_) {
          largest_.push_back(largest_fitting_size<T>(column.limit));
        }
      } else if (!alone_) {
        keep_what_fits(oversize);
      }
    }
  }

  [[nodiscard]] const Columns<T>& columns() const { return columns_; }
  [[nodiscard]] std::int64_t given() const { return given_; }
  /// The number of samples to be batched.
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
    } else if (!indices_) {
      for (std::size_t i = 0; i < out.size(); ++i) {  // vectorized, unlike GCC's std::iota
        out[i] = first + static_cast<std::int64_t>(i);
      }
    }
    if (indices_ && shuffle_) {
      for (std::int64_t& index : out) {
        index = (*indices_)[static_cast<std::size_t>(index)];
      }
    } else if (indices_) {
      std::copy_n(indices_->begin() + first, out.size(), out.begin());
    } else if (!left_out_.empty()) {
      pass_left_out(out);
    }
  }

  /// The sizes of all samples from `first` on if they are contiguous in memory, else null.
  [[nodiscard]] const T* contiguous(std::int64_t first) const {
    const T* const stored = columns_[0].sizes.data();
    const bool as_stored = !shuffle_ && !indices_ && left_out_.empty() && largest_.empty();
    return as_stored && columns_.size() == 1 && stored != nullptr ? stored + first : nullptr;
  }

  /// Sizes of these samples, sample after sample with all its columns.
  void gather(std::span<const std::int64_t> samples, std::vector<T>& sizes) const {
    sizes.resize(samples.size() * columns_.size());
    gather(samples, std::span(sizes));
  }
  void gather(std::span<const std::int64_t> samples, std::span<T> sizes) const {
    if (columns_.size() == 1) {
      // With a constant step the compiler makes a better loop.
      gather_column(0, samples, sizes.data(), std::integral_constant<std::size_t, 1>());
      return;
    }
    for (std::size_t c = 0; c < columns_.size(); ++c) {
      gather_column(c, samples, sizes.data() + c, columns_.size());
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
  // The number of samples between two checks for an interruption: some milliseconds.
  static constexpr std::int64_t kBetweenChecks = std::int64_t{1} << 20;
  // The number of places for which one number says how many samples are left out before the first.
  static constexpr std::size_t kPlaces = 512;

  // A loop of nothing but loads: each misses the cache, and many can be in flight at once.
  template <class Step>
  void gather_column(std::size_t column, std::span<const std::int64_t> samples, T* to,
                     Step step) const {
    columns_[column].sizes.visit([=](auto stored) {
      const auto* const from = stored.data();
      for (T* out = to; const std::int64_t sample : samples) {
        *out = static_cast<T>(from[sample]);  // NOLINT(bugprone-signed-char-misuse): a number
        out += step;
      }
    });
    if (!largest_.empty()) {
      for (std::size_t i = 0; i < samples.size(); ++i, to += step) {
        *to = truncated(*to, largest_[column]);
      }
    }
  }

  // Places among the samples that are not left out, as samples. Of many samples few are left out,
  // and where they are tells the rest: a list of all others would need 8 bytes per sample.
  void pass_left_out(std::span<std::int64_t> places) const {
    for (std::int64_t& place : places) {
      const auto part = static_cast<std::size_t>(place) / kPlaces;
      std::size_t low = passed_[part];
      for (std::size_t high = passed_[part + 1]; low < high;) {
        const std::size_t middle = low + (high - low) / 2;
        if (left_out_[middle].index - static_cast<std::int64_t>(middle) <= place) {
          low = middle + 1;
        } else {
          high = middle;
        }
      }
      place += static_cast<std::int64_t>(low);
    }
  }

  // The sample at a place comes after those left out whose index, less the number of those left out
  // before them, is no higher than the place. Counts them for every kPlaces-th place.
  void count_left_out() {
    const std::size_t parts = static_cast<std::size_t>(size()) / kPlaces + 2;
    passed_.reserve(parts);
    std::size_t passed = 0;
    for (std::size_t part = 0; part < parts; ++part) {
      const auto place = static_cast<std::int64_t>(part * kPlaces);
      while (passed < left_out_.size() &&
             left_out_[passed].index - static_cast<std::int64_t>(passed) <= place) {
        ++passed;
      }
      passed_.push_back(static_cast<std::uint32_t>(passed));
    }
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

  void keep_what_fits(Oversize oversize) {
    for (std::int64_t i = 0; i < given_; ++i) {
      if (i % kBetweenChecks == 0) {
        check_interruption();
      }
      const std::int64_t sample = indices_ ? (*indices_)[static_cast<std::size_t>(i)] : i;
      const auto over =
          std::find_if(columns_.begin(), columns_.end(), [&](const Column<T>& column) {
            const T size = column.sizes[static_cast<std::size_t>(sample)];
            return !fits_alone(column.limit, size);
          });
      if (over == columns_.end()) {
        if (indices_) {
          kept_.push_back(sample);
        }
      } else {
        check_argument(oversize != Oversize::error, "sample ", sample,
                       " exceeds the budget by itself: its size is ",
                       over->sizes[static_cast<std::size_t>(sample)], ", max_total_size is ",
                       maximum_of<T>(over->limit));
        left_out_.push_back({sample, LeftOutReason::over_budget});
      }
    }
    if (indices_) {
      indices_ = kept_;
    } else {
      count_left_out();
    }
  }

  Columns<T> columns_;
  std::optional<std::span<const std::int64_t>> indices_;
  bool shuffle_;
  std::int64_t given_ = 0;
  bool alone_ = false;
  std::vector<T> largest_;          // size of each column, if larger ones are truncated to it
  std::vector<std::int64_t> kept_;  // what is not left out of the indices, if there are any
  std::vector<LeftOut> left_out_;
  std::vector<std::uint32_t> passed_;  // the number of those before every kPlaces-th place
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
