#pragma once

#include <brim/batching/batching.h>
#include <brim/batching/interruption.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "batching/bin_packing.h"
#include "batching/permutation.h"
#include "check_argument.h"

namespace brim::batching::detail {

using brim::detail::check_argument;

// A batch emptier than this waits for the next window, whose samples may fill it.
inline constexpr double kFullEnough = 0.999;

template <class T>
void check_packed_multiple(std::size_t batch_multiple, const Columns<T>& columns) {
  check_argument(
      batch_multiple == 1 || BinPacking<T>(columns).padded(),
      "batch_multiple needs a cost that depends on the longest sample or on the count alone");
}

/// The last samples are left to best fit; a seed of 0 would mean that nothing is random.
inline Mixing mixing_of(std::size_t samples, double best_fit, std::uint64_t seed) {
  const auto left = static_cast<std::size_t>(static_cast<double>(samples) * best_fit);
  return {samples - left, seed | 1};
}

/// Window after window. The emptiest batch of a window is held back: its samples are packed again
/// with the next window. They and the place are the whole state.
///
/// Table is a SampleTable, or a StreamTable whose samples are read as they are needed.
template <class T, class Table>
class PackedSource : public BatchSource {
 public:
  PackedSource(Table& table, std::int64_t window, double best_fit, std::uint64_t seed,
               std::size_t batch_multiple = 1)
      : table_(table),
        permutation_(table.permutation(seed)),
        seed_(seed),
        window_(window),
        best_fit_(best_fit),
        packing_(table.columns(), batch_multiple) {}

  bool fill(Batches& block, std::int64_t /*world_size*/) override {
    std::int64_t window = window_;
    while (true) {
      check_interruption();
      table_.look_ahead(position_ + window + window / 2 + 1);
      const std::int64_t unread = table_.size() - position_;
      // The last window takes a remainder that is too small for a window of its own.
      const std::int64_t count = unread - window < window / 2 ? unread : window;
      const bool last = count == unread;
      read(count);
      if (table_.has_oversize()) {
        give_oversize(block);
      }
      table_.gather(samples_, sizes_);
      merge_carried();
      packing_.pack(sizes_, mixing());
      const std::size_t bins = packing_.bins();
      const std::size_t emptiest = last ? bins : emptiest_bin();
      if (bins > 1 || last) {
        give(block, emptiest);
        return !last;
      }
      // One batch holds more than a window: try again with as many samples added. One window at a
      // time would pack the samples of a large batch again and again.
      carried_ = samples_;
      window = std::max(window_, static_cast<std::int64_t>(samples_.size()));
    }
  }

  [[nodiscard]] std::int64_t rest() const override {
    return table_.size() - position_ + static_cast<std::int64_t>(carried_.size());
  }

  [[nodiscard]] Cursor cursor() const override {
    Cursor words{position_};
    words.insert(words.end(), carried_.begin(), carried_.end());
    return words;
  }

  void seek(const Cursor& cursor) override {
    check_argument(!cursor.empty() && cursor[0] >= 0 && cursor[0] <= table_.size() &&
                       std::all_of(cursor.begin() + 1, cursor.end(),
                                   [&](std::int64_t sample) { return table_.has(sample); }),
                   "the position is not one of these packed samples");
    position_ = cursor[0];
    carried_.assign(cursor.begin() + 1, cursor.end());
  }

 private:
  [[nodiscard]] Mixing mixing() const {
    return table_.shuffled()
               ? mixing_of(samples_.size() - merged_, best_fit_, of_window(0x9E3779B9U))
               : Mixing();
  }

  // A seed for one random choice in this window.
  [[nodiscard]] std::uint64_t of_window(std::uint64_t purpose) const {
    return mix(seed_ ^ purpose, static_cast<std::uint64_t>(position_));
  }

  void read(std::int64_t count) {
    samples_.resize(carried_.size() + static_cast<std::size_t>(count));
    std::copy(carried_.begin(), carried_.end(), samples_.begin());
    table_.read(permutation_, position_, std::span(samples_).subspan(carried_.size()));
    carried_count_ = carried_.size();
    carried_.clear();
    position_ += count;
  }

  // The packing takes only what fits. Each sample that does not has a batch of its own.
  void give_oversize(Batches& block) {
    MultiFill<T> fill(table_.columns());
    const auto fits = [&](std::int64_t sample) {
      table_.gather({&sample, 1}, sizes_);
      return fill.fits_alone(sizes_.data());
    };
    const auto fresh = samples_.begin() + static_cast<std::ptrdiff_t>(carried_count_);
    const auto over = std::stable_partition(fresh, samples_.end(), fits);
    for (auto sample = over; sample != samples_.end(); ++sample) {
      table_.gather({&*sample, 1}, sizes_);
      fill.clear();
      fill.add(sizes_.data());
      block.indices.push_back(*sample);
      block.close(fill.load());
    }
    samples_.erase(over, samples_.end());
  }

  // Carried samples are packed as one, so that they stay together in a batch that this window
  // completes. Not for sizes with fractions, whose sum depends on the order.
  void merge_carried() {
    merged_ = 0;
    const Columns<T>& columns = table_.columns();
    if (carried_count_ < 2 || columns.size() > 1 ||
        columns[0].limit.cost().kind() != Cost::Kind::sum || !all_whole<T>(sizes_)) {
      return;
    }
    merged_ = carried_count_ - 1;
    const auto end = sizes_.begin() + static_cast<std::ptrdiff_t>(carried_count_);
    *(end - 1) = std::accumulate(sizes_.begin(), end, T{0});
    sizes_.erase(sizes_.begin(), end - 1);
  }

  // The bin to hold back, or the number of bins if all are full. No sample is held back twice, so
  // each comes with its window or with the next.
  [[nodiscard]] std::size_t emptiest_bin() const {
    const std::vector<double>& loads = packing_.loads();
    std::size_t emptiest = loads.size();
    double least = kFullEnough;
    for (std::size_t bin = 0; bin < loads.size(); ++bin) {
      if (loads[bin] < least && !holds_carried(bin)) {
        least = loads[bin];
        emptiest = bin;
      }
    }
    return emptiest;
  }

  // Carried samples are the first that were read.
  [[nodiscard]] bool holds_carried(std::size_t bin) const {
    const auto members = packing_.members(bin);
    return std::any_of(members.begin(), members.end(),
                       [&](std::uint32_t member) { return member + merged_ < carried_count_; });
  }

  void give(Batches& block, std::size_t held_back) {
    const std::size_t bins = packing_.bins();
    const Permutation order(table_.shuffled() ? bins : 0, of_window(0x2545F491U));
    order_.resize(bins);
    if (table_.shuffled()) {
      order.read(0, std::span(order_));
    } else {
      std::iota(order_.begin(), order_.end(), 0U);
    }
    for (const std::uint32_t bin : order_) {
      const bool give_away = bin != held_back;
      std::vector<std::int64_t>& to = give_away ? block.indices : carried_;
      const auto members = packing_.members(bin);
      const std::size_t begin = to.size();
      to.resize(begin + members.size());
      std::int64_t* out = to.data() + begin;
      bool holds_merged = false;
      for (const std::uint32_t member : members) {
        *out++ = samples_[member + merged_];
        holds_merged |= member == 0;
      }
      if (holds_merged) {  // the last of the merged samples is there already
        to.insert(to.end(), samples_.begin(),
                  samples_.begin() + static_cast<std::ptrdiff_t>(merged_));
      }
      if (give_away) {
        block.close(packing_.loads()[bin]);
      }
    }
  }

  Table& table_;
  Permutation permutation_;
  std::uint64_t seed_;
  std::int64_t window_;
  double best_fit_;
  std::int64_t position_ = 0;
  std::vector<std::int64_t> carried_;
  std::size_t carried_count_ = 0;  // carried samples, the first of samples_
  std::size_t merged_ = 0;         // the number of those without a size of their own in sizes_
  std::vector<std::int64_t> samples_;
  std::vector<T> sizes_;
  std::vector<std::uint32_t> order_;
  BinPacking<T> packing_;
};

}  // namespace brim::batching::detail
