#pragma once

#include <brim/batching/batching.h>
#include <brim/batching/interruption.h>
#include <brim/batching/sample_index.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <sstream>
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

/// What some of the sizes, from number `first` on, add to the fingerprint of all: of each size with
/// its place, and then a sum, so that the places do not wait for each other.
template <class Stored>
[[nodiscard]] std::uint64_t fingerprint_part(std::span<const Stored> sizes, std::size_t first) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    sum += mix(std::bit_cast<std::uint64_t>(static_cast<double>(sizes[i]) + 0.0), first + i);
  }
  return sum;
}

/// largest_size of a column, without a pass over its sizes if it has a summary.
template <class T>
[[nodiscard]] T largest_of(const Column<T>& column) {
  if (column.summary == nullptr) {
    return largest_size(column.sizes);
  }
  const std::vector<T>& parts = column.summary->largest;
  return parts.empty() ? T{0} : *std::max_element(parts.begin(), parts.end());
}

/// Whether these are the same sizes and not only equal ones.
template <class T>
[[nodiscard]] bool same_memory(const SizeSpan<T>& a, const SizeSpan<T>& b) {
  const auto begin = [](auto stored) -> const void* { return stored.data(); };
  const auto width = [](auto stored) { return sizeof(stored[0]); };
  return a.size() == b.size() && a.visit(begin) == b.visit(begin) &&
         a.visit(width) == b.visit(width);
}

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
    check_argument(
        oversize != Oversize::split,
        "oversize \"split\" is for a LookAheadStream: DocumentParts makes samples of the "
        "parts of documents, for other batches");
    // Costs grow with the sizes: if the largest of each fit, all do.
    std::vector<T> most;
    for (const Column<T>& column : columns_) {
      most.push_back(largest_of(column));
    }
    const bool all_fit = MultiFill<T>(columns_).fits_alone(most.data());
    check_indices();
    given_ = indices_ ? static_cast<std::int64_t>(indices_->size())
                      : static_cast<std::int64_t>(columns_[0].sizes.size());
    if (!all_fit) {
      alone_ = oversize == Oversize::alone;
      if (oversize == Oversize::truncate) {
        for (const Column<T>& column : columns_) {
          refuse_to_truncate(column.limit);
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
      const auto* const joint = fill.joint();
      result.sizes +=
          joint != nullptr ? joint->share_of(sizes.data() + i) : static_cast<double>(sizes[i]);
      longest = std::max(longest, static_cast<double>(sizes[i]));
    }
    result.load = fill.load();
    result.work = result.load;
    result.padded = fill.joint() != nullptr ? fill.joint()->padded()
                                            : static_cast<double>(batch.size()) * longest;
    return result;
  }

 private:
  // The number of samples between two checks for an interruption: some milliseconds.
  static constexpr std::int64_t kBetweenChecks = std::int64_t{1} << 20;
  static constexpr std::int64_t kPart = SizeSummary<T>::kPart;
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

  // Names the first budget that it exceeds.
  [[noreturn]] void refuse(std::int64_t sample, const std::vector<T>& sizes) const {
    for (std::size_t c = 0;; c += joint_width(columns_, c)) {
      const std::size_t width = joint_width(columns_, c);
      const auto begin = columns_.begin() + static_cast<std::ptrdiff_t>(c);
      const Columns<T> one(begin, begin + static_cast<std::ptrdiff_t>(width));
      if (c + width == columns_.size() || !MultiFill<T>(one).fits_alone(sizes.data() + c)) {
        std::ostringstream text;
        text << sizes[c];
        for (std::size_t i = 1; i < width; ++i) {
          text << " × " << sizes[c + i];
        }
        check_argument(false, "sample ", sample, " exceeds the budget by itself: its size is ",
                       text.str(), ", max_total_size is ", maximum_of<T>(one[0].limit));
      }
    }
  }

  // Whether summaries tell that all samples of a part fit: costs grow with the sizes.
  [[nodiscard]] bool part_fits(const MultiFill<T>& fill, std::int64_t part) const {
    std::vector<T> most;
    for (const Column<T>& column : columns_) {
      if (column.summary == nullptr) {
        return false;
      }
      most.push_back(column.summary->largest[static_cast<std::size_t>(part)]);
    }
    return fill.fits_alone(most.data());
  }

  void keep_what_fits(Oversize oversize) {
    const MultiFill<T> fill(columns_);
    std::vector<T> sizes(columns_.size());
    for (std::int64_t i = 0; i < given_; ++i) {
      if (i % kBetweenChecks == 0) {
        check_interruption();
      }
      if (!indices_ && i % kPart == 0 && part_fits(fill, i / kPart)) {
        i += kPart - 1;
        continue;
      }
      const std::int64_t sample = indices_ ? (*indices_)[static_cast<std::size_t>(i)] : i;
      for (std::size_t c = 0; c < columns_.size(); ++c) {
        sizes[c] = columns_[c].sizes[static_cast<std::size_t>(sample)];
      }
      if (fill.fits_alone(sizes.data())) {
        if (indices_) {
          kept_.push_back(sample);
        }
      } else {
        if (oversize == Oversize::error) {
          refuse(sample, sizes);
        }
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
