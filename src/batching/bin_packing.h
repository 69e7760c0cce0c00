#pragma once

#include <brim/batching/interruption.h>
#include <brim/batching/sample_sizes.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "batching/alike.h"
#include "batching/batch_fill.h"
#include "batching/best_fit.h"
#include "batching/permutation.h"

namespace brim::batching::detail {

/// Whether sizes have no fraction and are small enough to be added up exactly.
template <class T>
[[nodiscard]] bool all_whole(std::span<const T> sizes) {
  if constexpr (std::is_same_v<T, double>) {
    return std::all_of(sizes.begin(), sizes.end(),
                       [](double size) { return size < 0x1p53 && size == std::floor(size); });
  } else {
    return true;
  }
}

/// Packs samples into as few batches as it can, whatever the budgets. Keeps its workspace.
///
/// Sums and counts: best fit decreasing; with several budgets by the one that a sample uses most
/// of. If a cost depends on the longest sample, samples of like size go together, the longest
/// first, which wastes least on padding; if they are padded in several sizes, those that are alike
/// in all of them (AlikeOrder).
///
/// If samples come in a random order, batches must not be the same ones each time. Without padding,
/// most samples are taken as they come, and best fit of the others fills the gaps (Mixing). With
/// padding, samples of like size must stay together: the first batch is cut short at random, which
/// shifts all others, and now and then a batch is dealt anew together with the samples that follow
/// it, so the two span twice the range of sizes. That adds up to a fifth to the padding. More would
/// not pay: fewer pairs meet again only for more padding.
///
/// Real sizes that are all whole are packed as whole numbers: their type makes no difference, so a
/// stream, whose sizes are real, gives the batches of a sampler.
template <class T>
class BinPacking {
 public:
  /// Keeps a reference to `columns`.
  explicit BinPacking(const Columns<T>& columns, std::size_t batch_multiple = 1)
      : columns_(columns),
        multiple_(static_cast<std::uint32_t>(batch_multiple)),
        counted_(std::all_of(columns.begin(), columns.end(), is_count)),
        padded_(counted_ || std::any_of(columns.begin(), columns.end(), depends_on_longest)) {
    for (std::size_t c = 0; c < columns.size(); ++c) {
      if (depends_on_longest(columns[c])) {
        padded_columns_.push_back(c);
      }
    }
  }

  /// @param sizes one per column, sample after sample; each sample fits by itself.
  /// @param mixing its seed decides all that is random; nothing is for 0.
  void pack(std::span<const T> sizes, const Mixing& mixing) {
    if constexpr (std::is_same_v<T, double>) {
      if (all_whole(sizes)) {
        pack_whole(sizes, mixing);
        return;
      }
    }
    loads_.clear();
    own_ends_.clear();
    const bool one = columns_.size() == 1;
    if (one && !padded_) {
      pack_sum(sizes, mixing);
      return;
    }
    if (!padded_) {
      pack_several(sizes, mixing.in_order);
    } else if (padded_columns_.size() > 1) {
      pack_alike(sizes, mixing.seed);
    } else {
      const std::vector<double> share = one ? std::vector<double>() : shares(sizes);
      if (one) {
        sort_(sizes, own_members_);
      } else {
        sort_(std::span(share), own_members_);
      }
      with_fill(columns_, [&](const auto& fill, auto at) {
        const auto size_of = [=](std::uint32_t i) { return at(sizes.data(), i); };
        const auto key_of = [&](std::uint32_t i) {
          return one ? static_cast<double>(sizes[i]) : share[i];
        };
        cut_sorted(fill, size_of, key_of, mixing.seed);
      });
    }
    members_ = own_members_;
    ends_ = own_ends_;
  }

  /// Whether a cost depends on the longest sample, so that Mixing::in_order is not used.
  [[nodiscard]] bool padded() const { return padded_; }

  [[nodiscard]] std::size_t bins() const { return loads_.size(); }
  /// Positions of the samples in a bin.
  [[nodiscard]] std::span<const std::uint32_t> members(std::size_t bin) const {
    const std::uint32_t begin = bin == 0 ? 0 : ends_[bin - 1];
    return members_.subspan(begin, ends_[bin] - begin);
  }
  /// Shares of the budget that bins use; of the fullest budget if there are several.
  [[nodiscard]] const std::vector<double>& loads() const { return loads_; }

 private:
  // Bins that are looked at for each sample; beyond that the fullest is closed.
  static constexpr std::size_t kOpenBins = 256;
  // One batch in this many, at random, is dealt anew with its neighbour, as long as all of them
  // together add no more than this share to the padding.
  static constexpr std::uint64_t kDealtBatches = 6;
  static constexpr double kMorePadding = 0.22;
  // The first batch is cut short only if there are this many: among fewer, one more would matter.
  static constexpr std::size_t kShiftedBatches = 16;

  struct OpenBin {
    MultiFill<T> fill;
    std::vector<std::uint32_t> members;
  };

  static bool is_count(const Column<T>& column) {
    return column.limit.cost().kind() == Cost::Kind::count;
  }

  static bool depends_on_longest(const Column<T>& column) {
    const Cost::Kind kind = column.limit.cost().kind();
    return kind != Cost::Kind::sum && kind != Cost::Kind::count;
  }

  // How much of its fullest budget each sample uses by itself; its size if only counts are limited.
  [[nodiscard]] std::vector<double> shares(std::span<const T> sizes) const {
    const std::size_t width = columns_.size();
    std::vector<double> result(sizes.size() / width);
    for (std::size_t i = 0; counted_ && i < result.size(); ++i) {
      result[i] = static_cast<double>(sizes[i * width]);
    }
    Columns<T> counting;  // if one is padded, its padding is what the order can save
    std::vector<std::size_t> places;
    for (std::size_t c = 0; c < width; ++c) {
      if (!padded_ || depends_on_longest(columns_[c])) {
        counting.push_back({{}, columns_[c].limit});
        places.push_back(c);
      }
    }
    if (counting.empty()) {
      return result;
    }
    MultiFill<T> alone(counting);
    std::vector<T> own(places.size());
    for (std::size_t i = 0; i < result.size(); ++i) {
      std::ranges::transform(places, own.begin(), [&](auto c) { return sizes[i * width + c]; });
      alone.clear();
      alone.add(own.data());
      result[i] = std::max(result[i], alone.load());
    }
    return result;
  }

  void pack_whole(std::span<const double> sizes, const Mixing& mixing) {
    if (whole_ == nullptr) {
      for (const Column<T>& column : columns_) {
        whole_columns_.push_back({{}, column.limit});
      }
      whole_ = std::make_unique<BinPacking<std::int64_t>>(whole_columns_, multiple_);
    }
    whole_sizes_.assign(sizes.begin(), sizes.end());
    whole_->pack(whole_sizes_, mixing);
    members_ = whole_->members_;
    ends_ = whole_->ends_;
    loads_ = whole_->loads_;
  }

  void pack_sum(std::span<const T> sizes, const Mixing& mixing) {
    const T maximum = maximum_of<T>(columns_[0].limit);
    best_fit_.pack(sizes, maximum, mixing);
    members_ = best_fit_.members();
    ends_ = best_fit_.ends();
    loads_.reserve(ends_.size());
    for (const T total : best_fit_.totals()) {
      loads_.push_back(total > 0 ? static_cast<double>(total) / static_cast<double>(maximum) : 0.0);
    }
  }

  // Cuts own_members_, which are sorted by key, into batches; each takes samples as long as they
  // fit.
  template <class AnyFill, class SizeOf, class KeyOf>
  void cut_sorted(AnyFill fill, const SizeOf& size_of, const KeyOf& key_of, std::uint64_t seed) {
    const auto count = static_cast<std::uint32_t>(own_members_.size());
    const auto take = [&](const std::vector<std::uint32_t>& from, std::uint32_t begin,
                          std::uint32_t most) {
      const auto size_at = [&](std::size_t place) { return size_of(from[place]); };
      fill.clear();
      const std::size_t end = add_what_fits(fill, begin, begin, most, size_at);
      return static_cast<std::uint32_t>(keep_multiple(fill, begin, end, multiple_, size_at));
    };
    const auto close = [&](std::uint32_t end) {
      check_interruption();
      own_ends_.push_back(end);
      loads_.push_back(fill.load());
      return end;
    };
    for (std::uint32_t begin = 0; begin < count;) {
      begin = close(take(own_members_, begin, count));
    }
    if (seed == 0 || own_ends_.size() < 2) {
      return;
    }

    const auto key = [&](std::uint32_t place) { return key_of(own_members_[place]); };
    double padding = 0.0;
    for (std::uint32_t batch = 0, i = 0; batch < own_ends_.size(); ++batch) {
      for (const double longest = key(i); i < own_ends_[batch]; ++i) {
        padding += longest - key(i);
      }
    }
    double allowed = kMorePadding * padding;
    const std::uint32_t first = own_ends_[0];
    const bool shift = own_ends_.size() >= kShiftedBatches;
    own_ends_.clear();
    loads_.clear();
    std::uint32_t begin = 0;
    if (shift) {
      const auto most = 1 + static_cast<std::uint32_t>(below(mix(~seed, 0), first));
      begin = close(take(own_members_, 0, (most + multiple_ - 1) / multiple_ * multiple_));
    }
    while (begin < count) {
      const std::uint32_t end = take(own_members_, begin, count);
      const std::uint32_t both = end - begin < count - end ? 2 * end - begin : count;
      const std::uint64_t number = own_ends_.size();
      const std::uint64_t chosen = below(mix(seed, number / kDealtBatches), kDealtBatches);
      if (both == end || number % kDealtBatches != chosen) {
        begin = close(end);
        continue;
      }
      const double more = (both - end) * (key(begin) - key(end));
      dealt_.assign(own_members_.begin() + begin, own_members_.begin() + both);
      for (std::uint32_t i = both - begin; i > 1; --i) {
        std::swap(dealt_[i - 1], dealt_[below(mix(seed ^ begin, i), i)]);
      }
      // As many samples, none longer than the longest, fit one budget, but not always several.
      const std::uint32_t half = end - begin;
      const bool deal = more <= allowed && take(dealt_, 0, half) == half &&
                        take(dealt_, half, both - begin) == both - begin;
      if (deal) {
        allowed -= more;
        std::copy(dealt_.begin(), dealt_.end(), own_members_.begin() + begin);
      }
      begin = close(take(own_members_, begin, end));
      if (deal) {
        begin = close(take(own_members_, begin, both));
      }
    }
  }

  // Cuts the best of some orders in which samples that follow each other are alike.
  void pack_alike(std::span<const T> sizes, std::uint64_t seed) {
    const std::size_t width = columns_.size();
    MultiFill<T> fill(columns_);
    const auto cut = [&](const std::vector<std::uint32_t>& order, std::uint32_t first_most,
                         std::size_t enough, const auto& close) {
      const auto size_at = [&](std::size_t place) { return sizes.data() + order[place] * width; };
      for (std::size_t begin = 0, bins = 0; begin < order.size() && bins < enough; ++bins) {
        check_interruption();
        fill.clear();
        const std::size_t most =
            bins == 0 ? std::min<std::size_t>(first_most, order.size()) : order.size();
        const std::size_t end = add_what_fits(fill, begin, begin, most, size_at);
        begin = keep_multiple(fill, begin, end, multiple_, size_at);
        close(static_cast<std::uint32_t>(begin));
      }
    };
    constexpr std::uint32_t kAll = std::numeric_limits<std::uint32_t>::max();
    const auto batches_of = [&](const std::vector<std::uint32_t>& order, std::size_t enough) {
      std::size_t batches = 0;
      cut(order, kAll, enough, [&](auto) { ++batches; });
      return batches;
    };
    const std::vector<double> share = shares(sizes);
    own_members_ = alike_.best<T>(sizes, width, padded_columns_, share, sort_, seed, batches_of);
    const auto take = [&](std::uint32_t first_most) {
      own_ends_.clear();
      loads_.clear();
      cut(own_members_, first_most, kAll, [&](std::uint32_t end) {
        own_ends_.push_back(end);
        loads_.push_back(fill.load());
      });
    };
    take(kAll);
    if (seed != 0 && own_ends_.size() >= kShiftedBatches) {
      const auto most = 1 + static_cast<std::uint32_t>(below(mix(~seed, 0), own_ends_[0]));
      take((most + multiple_ - 1) / multiple_ * multiple_);
    }
  }

  void pack_several(std::span<const T> sizes, std::size_t in_order) {
    const std::size_t width = columns_.size();
    const std::vector<double> share = shares(sizes);
    std::vector<std::uint32_t> order;
    sort_(std::span(share), order, std::min(in_order, share.size()));

    own_members_.clear();
    std::vector<OpenBin> open;
    std::vector<double> open_loads;
    const auto close = [&](std::size_t bin) {
      own_members_.insert(own_members_.end(), open[bin].members.begin(), open[bin].members.end());
      own_ends_.push_back(static_cast<std::uint32_t>(own_members_.size()));
      loads_.push_back(open_loads[bin]);
    };
    for (const std::uint32_t sample : order) {
      check_interruption();
      const T* of_sample = sizes.data() + sample * width;
      std::size_t best = open.size();
      for (std::size_t bin = 0; bin < open.size(); ++bin) {
        if ((best == open.size() || open_loads[bin] > open_loads[best]) &&
            open[bin].fill.fits(of_sample)) {
          best = bin;
        }
      }
      if (best == open.size()) {
        if (open.size() == kOpenBins) {
          best = static_cast<std::size_t>(std::max_element(open_loads.begin(), open_loads.end()) -
                                          open_loads.begin());
          close(best);
          open[best].fill.clear();
          open[best].members.clear();
        } else {
          open.push_back({MultiFill<T>(columns_), {}});
          open_loads.push_back(0.0);
        }
      }
      open[best].fill.add(of_sample);
      open[best].members.push_back(sample);
      open_loads[best] = open[best].fill.load();
    }
    for (std::size_t bin = 0; bin < open.size(); ++bin) {
      close(bin);
    }
  }

  const Columns<T>& columns_;
  std::uint32_t multiple_;  // divides the number of samples in a padded batch
  // Batches limited by their number of samples alone are packed to save padding.
  bool counted_;
  bool padded_;
  std::vector<std::size_t> padded_columns_;
  BestFitPacker<T> best_fit_;
  AlikeOrder alike_;
  DescendingSort sort_;
  std::span<const std::uint32_t> members_;
  std::span<const std::uint32_t> ends_;
  std::vector<double> loads_;
  std::vector<std::uint32_t> own_members_;
  std::vector<std::uint32_t> own_ends_;
  std::vector<std::uint32_t> dealt_;

  // For real sizes that are whole.
  friend class BinPacking<double>;
  Columns<std::int64_t> whole_columns_;
  std::unique_ptr<BinPacking<std::int64_t>> whole_;
  std::vector<std::int64_t> whole_sizes_;
};

}  // namespace brim::batching::detail
