#pragma once

#include <brim/batching/batch_fill.h>
#include <brim/batching/look_ahead.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <utility>
#include <vector>

#include "batching/permutation.h"
#include "check_argument.h"

namespace brim::batching::detail {

/// The sizes of samples in the order they come, with as many per sample as there are limits. One
/// piece of memory: an allocation per sample takes longer than packing it.
class SizeRows {
 public:
  explicit SizeRows(std::size_t columns) : columns_(columns) {}

  /// Of sample `number`, counted from the first that is held.
  [[nodiscard]] std::span<const double> operator[](std::int64_t number) const {
    return std::span(values_).subspan(begin_ + static_cast<std::size_t>(number) * columns_,
                                      columns_);
  }
  [[nodiscard]] bool empty() const { return begin_ == values_.size(); }
  [[nodiscard]] std::span<const double> last() const { return std::span(values_).last(columns_); }

  void push_back(std::span<const double> row) {
    values_.insert(values_.end(), row.begin(), row.end());
  }

  /// Values move when half of the memory is unused, so each moves once on average.
  void pop_front(std::int64_t samples) {
    begin_ += static_cast<std::size_t>(samples) * columns_;
    if (2 * begin_ > values_.size()) {
      values_.erase(values_.begin(), values_.begin() + static_cast<std::ptrdiff_t>(begin_));
      begin_ = 0;
    }
  }

 private:
  std::size_t columns_;
  std::size_t begin_ = 0;
  std::vector<double> values_;
};

/// The sizes of samples that are read as they are needed; numbered from 0 on in the order they
/// come. Those that exceed the budget have a number, but no place among the samples to be batched.
class StreamTable {
 public:
  StreamTable(std::vector<Limit> limits, const LookAheadOptions& options,
              LookAheadCore::ReadSizes read)
      : read_(std::move(read)),
        oversize_(options.oversize),
        shuffle_(options.shuffle),
        boundaries_(options.boundaries),
        row_(limits.size()),
        empty_batch_(limits),
        sizes_(limits.size()) {
    for (Limit& limit : limits) {
      columns_.push_back({{}, std::move(limit)});
    }
    if (oversize_ == Oversize::truncate) {
      empty_batch_.truncate(row_);  // an error at once if no size fits
    }
  }

  /// look_ahead reads this number of samples in addition.
  void widen_margin(std::int64_t samples) { margin_ = std::max(margin_, samples); }

  /// Reads until there are this many samples to be batched, or no more.
  void look_ahead(std::int64_t samples) {
    while (!ended_ && size() < samples + margin_) {
      ended_ = !read_row();
      if (ended_) {
        note_fingerprint();
      } else {
        take_row();
      }
    }
  }

  [[nodiscard]] const Columns<double>& columns() const { return columns_; }
  [[nodiscard]] bool shuffled() const { return shuffle_; }
  [[nodiscard]] bool has_oversize() const { return oversize_ == Oversize::alone; }
  [[nodiscard]] static Permutation permutation(std::uint64_t /*seed*/) { return {}; }
  /// The number of samples to be batched that were read so far.
  [[nodiscard]] std::int64_t size() const {
    return first_place_ + static_cast<std::int64_t>(places_.size());
  }
  [[nodiscard]] bool has(std::int64_t sample) const {
    return sample >= first_sample_ && sample < samples_read_;
  }
  /// The number of the sample at a place; of the next to be read if it is at the end.
  [[nodiscard]] std::int64_t sample_at(std::int64_t place) const {
    return place == size() ? samples_read_
                           : places_[static_cast<std::size_t>(place - first_place_)];
  }
  [[nodiscard]] std::span<const double> sizes_of(std::int64_t sample) const {
    return sizes_[sample - first_sample_];
  }

  void read(const Permutation& /*none*/, std::int64_t first, std::span<std::int64_t> out) const {
    std::copy_n(places_.begin() + (first - first_place_), out.size(), out.begin());
  }
  void gather(std::span<const std::int64_t> samples, std::vector<double>& sizes) const {
    sizes.clear();
    for (const std::int64_t sample : samples) {
      const auto own = sizes_of(sample);
      sizes.insert(sizes.end(), own.begin(), own.end());
    }
  }

  /// Forgets the samples with lower numbers, and places before that of the first to be kept.
  void forget_before(std::int64_t sample, std::int64_t place) {
    sizes_.pop_front(std::max<std::int64_t>(sample - first_sample_, 0));
    first_sample_ = std::max(first_sample_, sample);
    for (; first_place_ < place; ++first_place_) {
      places_.pop_front();
    }
  }

  /// Begins anew before the first sample is read: reads up to `sample`, which gets `place`. Of
  /// those before, only `held` are measured and kept.
  void skip_to(std::int64_t sample, std::int64_t place, std::span<const std::int64_t> held) {
    std::vector<std::int64_t> wanted(held.begin(), held.end());
    std::sort(wanted.begin(), wanted.end());
    first_sample_ = wanted.empty() ? sample : std::min(sample, wanted.front());
    first_place_ = place;
    from_start_ = false;
    auto next = wanted.begin();
    for (; samples_read_ < sample; ++samples_read_) {
      const bool keep = next != wanted.end() && *next == samples_read_;
      check_argument(keep ? read_row() : read_({}),
                     "the state is of other samples: it stands at sample ", sample,
                     ", and there are only ", samples_read_);
      if (samples_read_ >= first_sample_) {
        sizes_.push_back(row_);  // of one that is not kept, nobody asks
      }
      next += keep ? 1 : 0;
    }
  }

  [[nodiscard]] std::int64_t samples_read() const { return samples_read_; }
  [[nodiscard]] const std::vector<std::uint64_t>& fingerprints() const { return fingerprints_; }
  [[nodiscard]] bool sizes_differ() const { return sizes_differ_; }
  [[nodiscard]] const std::vector<LeftOut>& left_out() const { return left_out_; }

 private:
  bool read_row() {
    const bool more = read_(row_);
    if (more && oversize_ == Oversize::truncate) {
      empty_batch_.truncate(row_);
    }
    return more;
  }

  void note_fingerprint() {
    if (from_start_) {
      fingerprints_.push_back(fingerprint_);
    }
  }

  void take_row() {
    for (const double size : row_) {
      fingerprint_ = mix(fingerprint_, std::bit_cast<std::uint64_t>(size));
    }
    sizes_differ_ |= !sizes_.empty() && !std::ranges::equal(sizes_.last(), row_);
    const std::int64_t sample = samples_read_++;
    if (std::has_single_bit(static_cast<std::uint64_t>(samples_read_))) {
      note_fingerprint();
    }
    sizes_.push_back(row_);
    const bool inside =
        boundaries_.empty() || (row_[0] >= boundaries_.front() && row_[0] < boundaries_.back());
    if (oversize_ != Oversize::alone && !empty_batch_.fits_alone(row_)) {
      if (oversize_ == Oversize::error) {
        refuse_oversize(sample, row_);
      }
      left_out_.push_back({sample, LeftOutReason::over_budget});
    } else if (!inside) {
      left_out_.push_back({sample, LeftOutReason::outside_buckets});
    } else {
      places_.push_back(sample);
    }
  }

  LookAheadCore::ReadSizes read_;
  Oversize oversize_;
  bool shuffle_;
  std::vector<double> boundaries_;  // of buckets, if there are any
  std::int64_t margin_ = 0;
  std::vector<double> row_;  // of the last sample
  BatchFill empty_batch_;
  Columns<double> columns_;          // without sizes
  SizeRows sizes_;                   // from sample first_sample_ on
  std::deque<std::int64_t> places_;  // samples to be batched, from first_place_ on
  std::int64_t first_sample_ = 0;
  std::int64_t first_place_ = 0;
  std::int64_t samples_read_ = 0;
  std::vector<LeftOut> left_out_;
  std::vector<std::uint64_t> fingerprints_;
  std::uint64_t fingerprint_ = 0;  // of all sizes so far
  bool sizes_differ_ = false;
  bool from_start_ = true;
  bool ended_ = false;
};

}  // namespace brim::batching::detail
