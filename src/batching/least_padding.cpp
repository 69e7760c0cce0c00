#include <brim/batching/buckets.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>

#include "batching/unique_sizes.h"

namespace brim::batching {
namespace {

using detail::Distinct;

constexpr std::size_t kMostCandidates = 20'000;  // boundaries that are considered
static_assert(kMostCandidates <= std::numeric_limits<std::uint16_t>::max());

/// The padding of any range of sizes, from sums over all sizes before each place where a bucket
/// may start. `Cost` is exact as std::int64_t where nothing overflows, else a double.
template <typename Cost>
class PaddingCosts {
 public:
  void reserve(std::size_t starts) {
    counts_.reserve(starts + 1);
    sums_.reserve(starts + 1);
    longest_.reserve(starts);
  }

  /// Adds a size, not below the ones before it; `start`: a bucket may start with it.
  void add(Cost size, std::int64_t count, bool start) {
    if (start) {
      counts_.push_back(count_);
      sums_.push_back(sum_);
      longest_.push_back(size);
    }
    longest_.back() = size;
    count_ += static_cast<Cost>(count);
    sum_ += static_cast<Cost>(count) * size;
  }

  void finish() {
    counts_.push_back(count_);
    sums_.push_back(sum_);
  }

  std::size_t starts() const { return longest_.size(); }

  /// Of one bucket from start `first` up to the sizes that follow start `last`.
  Cost operator()(std::size_t first, std::size_t last) const {
    return (counts_[last + 1] - counts_[first]) * longest_[last] - (sums_[last + 1] - sums_[first]);
  }

 private:
  std::vector<Cost> counts_, sums_;  // of all samples before a start
  std::vector<Cost> longest_;        // up to the next start
  Cost count_ = 0, sum_ = 0;
};

/// Fills one layer of the dynamic programme: `best[last]` is the least padding of all sizes up to
/// `last`, with one bucket more than `before`. A bucket that ends later never starts earlier in the
/// best division (the costs are Monge), so the middle one halves the starts that are left to try.
template <typename Cost>
struct Layer {
  const PaddingCosts<Cost>& costs;
  const std::vector<Cost>& before;
  std::vector<Cost>& best;
  std::vector<std::uint16_t>& start;

  void fill(std::size_t low, std::size_t high, std::size_t start_low, std::size_t start_high) {
    if (low > high) {
      return;
    }
    const std::size_t middle = low + (high - low) / 2;
    std::size_t chosen = start_low;
    Cost least = before[start_low - 1] + costs(start_low, middle);
    for (std::size_t i = start_low + 1; i <= std::min(middle, start_high); ++i) {
      const Cost padding = before[i - 1] + costs(i, middle);
      if (padding < least) {
        least = padding;
        chosen = i;
      }
    }
    best[middle] = least;
    start[middle] = static_cast<std::uint16_t>(chosen);
    if (middle > low) {
      fill(low, middle - 1, start_low, chosen);
    }
    fill(middle + 1, high, chosen, start_high);
  }
};

/// The starts of the `buckets` buckets that pad least; 1 < buckets < costs.starts().
template <typename Cost>
std::vector<std::size_t> best_starts(const PaddingCosts<Cost>& costs, std::size_t buckets) {
  const std::size_t count = costs.starts();
  std::vector<Cost> before(count);
  std::vector<Cost> best(count);
  for (std::size_t last = 0; last < count; ++last) {
    before[last] = costs(0, last);
  }
  std::vector<std::vector<std::uint16_t>> starts(buckets);
  for (std::size_t k = 1; k < buckets; ++k) {
    starts[k].resize(count);
    // Bucket k needs one start for each bucket before it, and leaves one for each after it.
    const std::size_t high = count - buckets + k;
    Layer<Cost>{costs, before, best, starts[k]}.fill(k, high, k, high);
    before.swap(best);
  }
  std::vector<std::size_t> result(buckets, 0);
  std::size_t last = count - 1;
  for (std::size_t k = buckets - 1; k > 0; --k) {
    result[k] = starts[k][last];
    last = result[k] - 1;
  }
  return result;
}

/// Which of the distinct sizes a bucket may start with: all, or where there are too many, those at
/// which either the samples so far or the sizes pass another 20 000th part, whatever `position`
/// (from 0 to 1) says of a size.
template <typename Size, typename Position>
std::vector<std::size_t> candidates(const Distinct<Size>& sizes, std::size_t samples,
                                    const Position& position) {
  constexpr double kParts = static_cast<double>(kMostCandidates) / 2;
  const std::size_t count = sizes.sizes.size();
  std::vector<std::size_t> result;
  result.reserve(std::min(count, kMostCandidates));
  std::int64_t seen = 0;
  std::array<double, 2> previous{-1.0, -1.0};
  for (std::size_t i = 0; i < count; ++i) {
    const std::array<double, 2> part{
        std::floor(static_cast<double>(seen) / static_cast<double>(samples) * kParts),
        std::min(std::floor(position(sizes.sizes[i]) * kParts), kParts - 1)};
    if (count <= kMostCandidates || part != previous) {
      result.push_back(i);
    }
    previous = part;
    seen += sizes.counts[i];
  }
  return result;
}

template <typename Cost, typename Size, typename Offset>
std::vector<std::size_t> padding_starts(const Distinct<Size>& sizes,
                                        const std::vector<std::size_t>& candidate,
                                        std::size_t buckets, const Offset& offset) {
  PaddingCosts<Cost> costs;
  costs.reserve(candidate.size());
  std::size_t next = 0;
  for (std::size_t i = 0; i < sizes.sizes.size(); ++i) {
    const bool start = next < candidate.size() && candidate[next] == i;
    costs.add(static_cast<Cost>(offset(sizes.sizes[i])), sizes.counts[i], start);
    next += start ? 1 : 0;
  }
  costs.finish();
  return best_starts(costs, buckets);
}

/// `scaled(size)`: a size as a double in [0, 1] (0: the smallest); `exact`: its distance from the
/// smallest as an integer, where the padding is known to fit 64 bits.
template <typename Size, typename Scaled, typename Exact>
std::vector<Size> least_padding(const Distinct<Size>& sizes, std::size_t samples,
                                std::size_t buckets, const Scaled& scaled, const Exact& exact,
                                bool fits) {
  detail::require(buckets >= 1, "buckets", std::to_string(buckets), "at least 1");
  std::vector<Size> boundaries;
  const std::vector<std::size_t> candidate = buckets < sizes.sizes.size()
                                                 ? candidates(sizes, samples, scaled)
                                                 : std::vector<std::size_t>{};
  if (buckets == 1) {
    boundaries.push_back(sizes.sizes.front());
  } else if (candidate.empty()) {
    boundaries = sizes.sizes;  // a bucket for each: no padding at all
  } else if (buckets >= candidate.size()) {
    for (const std::size_t i : candidate) {
      boundaries.push_back(sizes.sizes[i]);
    }
  } else {
    const std::vector<std::size_t> starts =
        fits ? padding_starts<std::int64_t>(sizes, candidate, buckets, exact)
             : padding_starts<double>(sizes, candidate, buckets, scaled);
    for (const std::size_t start : starts) {
      boundaries.push_back(sizes.sizes[candidate[start]]);
    }
  }
  boundaries.push_back(detail::just_above(sizes.sizes.back()));
  return boundaries;
}

}  // namespace

std::vector<std::int64_t> least_padding_boundaries(std::span<const std::int64_t> sizes,
                                                   std::size_t buckets) {
  detail::require_sizes(sizes);
  const Distinct<std::int64_t> found = detail::distinct(sizes);
  const std::int64_t low = found.sizes.front();
  const auto exact = [low](std::int64_t size) {
    return static_cast<std::uint64_t>(size) - static_cast<std::uint64_t>(low);
  };
  const std::uint64_t range = std::max(exact(found.sizes.back()), std::uint64_t{1});
  const auto scaled = [&](std::int64_t size) {
    return static_cast<double>(exact(size)) / static_cast<double>(range);
  };
  const bool fits = range <= (std::uint64_t{1} << 62) / sizes.size();
  return least_padding(found, sizes.size(), buckets, scaled, exact, fits);
}

std::vector<double> least_padding_boundaries(std::span<const double> sizes, std::size_t buckets) {
  detail::require_sizes(sizes);
  const Distinct<double> found = detail::distinct(sizes);
  // Halves: the distance of two finite doubles may pass the largest.
  const double low = found.sizes.front() / 2;
  const double range = found.sizes.back() / 2 - low;
  const auto scaled = [=](double size) { return range > 0 ? (size / 2 - low) / range : 0.0; };
  return least_padding(found, sizes.size(), buckets, scaled, scaled, false);
}

}  // namespace brim::batching
