#include "batching/bin_packing.h"

#include <algorithm>
#include <numeric>

#include "batching/gauge.h"

namespace brim::batching::detail {
namespace {

// Bins that are looked at for each sample; the fullest are closed first where there are more.
constexpr std::size_t kOpenBins = 256;

template <class T>
struct OpenBin {
  MultiGauge<T> gauge;
  std::vector<std::uint32_t> members;
};

}  // namespace

template <class T>
void BinPacking<T>::pack(std::span<const T> sizes) {
  loads_.clear();
  if (columns_.size() > 1) {
    pack_several(sizes);
  } else if (columns_[0].limit.cost().kind() == Cost::Kind::sum) {
    pack_sum(sizes);
  } else {
    pack_padded(sizes);
  }
}

template <class T>
void BinPacking<T>::pack_sum(std::span<const T> sizes) {
  const T maximum = maximum_of<T>(columns_[0].limit);
  best_fit_.pack(sizes, maximum);
  members_ = best_fit_.members();
  ends_ = best_fit_.ends();
  loads_.reserve(ends_.size());
  for (const T total : best_fit_.totals()) {
    loads_.push_back(total > 0 ? static_cast<double>(total) / static_cast<double>(maximum) : 0.0);
  }
}

template <class T>
void BinPacking<T>::pack_padded(std::span<const T> sizes) {
  sort_descending(sizes, own_members_);
  own_ends_.clear();
  PaddedGauge<T> gauge(columns_[0].limit);
  const auto close = [&](std::size_t end) {
    own_ends_.push_back(static_cast<std::uint32_t>(end));
    loads_.push_back(gauge.load());
    gauge.clear();
  };
  for (std::size_t i = 0; i < own_members_.size(); ++i) {
    const T size = sizes[own_members_[i]];
    if (i > 0 && !gauge.fits(size)) {
      close(i);
    }
    gauge.add(size);
  }
  if (!own_members_.empty()) {
    close(own_members_.size());
  }
  members_ = own_members_;
  ends_ = own_ends_;
}

template <class T>
void BinPacking<T>::pack_several(std::span<const T> sizes) {
  const std::size_t width = columns_.size();
  const std::size_t samples = sizes.size() / width;
  std::vector<double> shares(samples);
  MultiGauge<T> alone(columns_);
  for (std::size_t i = 0; i < samples; ++i) {
    alone.clear();
    alone.add(sizes.data() + i * width);
    shares[i] = alone.load();
  }
  std::vector<std::uint32_t> order(samples);
  std::iota(order.begin(), order.end(), 0U);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return shares[a] > shares[b]; });

  own_members_.clear();
  own_ends_.clear();
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
          open[bin].gauge.fits(of_sample)) {
        best = bin;
      }
    }
    if (best == open.size()) {
      if (open.size() == kOpenBins) {
        best = static_cast<std::size_t>(std::max_element(open_loads.begin(), open_loads.end()) -
                                        open_loads.begin());
        close(best);
        open[best].gauge.clear();
        open[best].members.clear();
      } else {
        open.push_back({MultiGauge<T>(columns_), {}});
        open_loads.push_back(0.0);
      }
    }
    open[best].gauge.add(of_sample);
    open[best].members.push_back(sample);
    open_loads[best] = open[best].gauge.load();
  }
  for (std::size_t bin = 0; bin < open.size(); ++bin) {
    close(bin);
  }
  members_ = own_members_;
  ends_ = own_ends_;
}

template class BinPacking<std::int64_t>;
template class BinPacking<double>;

}  // namespace brim::batching::detail
