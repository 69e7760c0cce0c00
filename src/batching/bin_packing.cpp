#include "batching/bin_packing.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "batching/batch_fill.h"
#include "batching/permutation.h"

namespace brim::batching::detail {
namespace {

// Bins that are looked at for each sample; the fullest are closed first where there are more.
constexpr std::size_t kOpenBins = 256;
// Of so many batches one, at random, is dealt anew with its neighbour; while all of them together
// add no more than this share to the padding.
constexpr std::uint64_t kDealtBatches = 6;
constexpr double kMorePadding = 0.22;
// The first batch is cut short from so many batches on: among fewer one more would be felt.
constexpr std::size_t kShiftedBatches = 16;

bool of_longest(Cost::Kind kind) { return kind != Cost::Kind::sum && kind != Cost::Kind::count; }

template <class T>
struct OpenBin {
  MultiFill<T> fill;
  std::vector<std::uint32_t> members;
};

}  // namespace

template <class T>
BinPacking<T>::BinPacking(const Columns<T>& columns)
    : columns_(columns),
      // Batches of a number of samples alone are packed for the sake of their padding.
      padded_((columns.size() == 1 && columns[0].limit.cost().kind() == Cost::Kind::count) ||
              std::any_of(columns.begin(), columns.end(), [](const Column<T>& column) {
                return of_longest(column.limit.cost().kind());
              })) {}

template <class T>
void BinPacking<T>::pack(std::span<const T> sizes, const Mixing& mixing) {
  loads_.clear();
  own_ends_.clear();
  const std::size_t width = columns_.size();
  if (width == 1 && !padded_) {
    pack_sum(sizes, mixing);
    return;
  }
  if (!padded_) {
    pack_several(sizes, mixing);
  } else if (width == 1) {
    sort_descending(sizes, own_members_);
    const auto size_of = [&](std::uint32_t i) { return sizes[i]; };
    cut_sorted(PaddedFill<T>(columns_[0].limit), size_of, size_of, mixing.seed);
  } else {
    const std::vector<double> share = shares(sizes);
    sort_descending(std::span(share), own_members_);
    cut_sorted(
        MultiFill<T>(columns_), [&](std::uint32_t i) { return sizes.data() + i * width; },
        [&](std::uint32_t i) { return share[i]; }, mixing.seed);
  }
  members_ = own_members_;
  ends_ = own_ends_;
}

template <class T>
std::vector<double> BinPacking<T>::shares(std::span<const T> sizes) const {
  const std::size_t width = columns_.size();
  std::vector<double> result(sizes.size() / width);
  for (std::size_t c = 0; c < width; ++c) {
    // Where one is padded, its padding is what the order can save.
    if (padded_ && !of_longest(columns_[c].limit.cost().kind())) {
      continue;
    }
    const Columns<T> one{columns_[c]};
    MultiFill<T> alone(one);
    for (std::size_t i = 0; i < result.size(); ++i) {
      alone.clear();
      alone.add(sizes.data() + i * width + c);
      result[i] = std::max(result[i], alone.load());
    }
  }
  return result;
}

template <class T>
void BinPacking<T>::pack_sum(std::span<const T> sizes, const Mixing& mixing) {
  const T maximum = maximum_of<T>(columns_[0].limit);
  best_fit_.pack(sizes, maximum, mixing);
  members_ = best_fit_.members();
  ends_ = best_fit_.ends();
  loads_.reserve(ends_.size());
  for (const T total : best_fit_.totals()) {
    loads_.push_back(total > 0 ? static_cast<double>(total) / static_cast<double>(maximum) : 0.0);
  }
}

// Cuts own_members_, which are sorted by their keys, into batches; each takes samples for as long
// as they fit.
template <class T>
template <class Fill, class SizeOf, class KeyOf>
void BinPacking<T>::cut_sorted(Fill fill, const SizeOf& size_of, const KeyOf& key_of,
                               std::uint64_t seed) {
  const auto count = static_cast<std::uint32_t>(own_members_.size());
  const auto take = [&](const std::vector<std::uint32_t>& from, std::uint32_t begin,
                        std::uint32_t most) {
    fill.clear();
    std::uint32_t end = begin;
    while (end < most && (end == begin || fill.fits(size_of(from[end])))) {
      fill.add(size_of(from[end++]));
    }
    return end;
  };
  const auto close = [&](std::uint32_t end) {
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

  const auto key = [&](std::uint32_t place) {
    return static_cast<double>(key_of(own_members_[place]));
  };
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
    begin = close(take(own_members_, 0, most));
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
    // As many samples, none longer than the longest, fit one budget; but not always several.
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

template <class T>
void BinPacking<T>::pack_several(std::span<const T> sizes, const Mixing& mixing) {
  const std::size_t width = columns_.size();
  const std::vector<double> share = shares(sizes);
  std::vector<std::uint32_t> order(share.size());
  std::iota(order.begin(), order.end(), 0U);
  const std::size_t in_order = std::min(mixing.in_order, order.size());
  std::stable_sort(order.begin() + static_cast<std::ptrdiff_t>(in_order), order.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return share[a] > share[b]; });

  own_members_.clear();
  std::vector<OpenBin<T>> open;
  std::vector<double> open_loads;
  const auto close = [&](std::size_t bin) {
    own_members_.insert(own_members_.end(), open[bin].members.begin(), open[bin].members.end());
    own_ends_.push_back(static_cast<std::uint32_t>(own_members_.size()));
    loads_.push_back(open_loads[bin]);
  };
  for (const std::uint32_t sample : order) {
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

template class BinPacking<std::int64_t>;
template class BinPacking<double>;

}  // namespace brim::batching::detail
