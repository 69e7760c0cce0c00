#include <brim/batching/buckets.h>
#include <brim/batching/interruption.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "batching/unique_sizes.h"

namespace brim::batching {
namespace {

constexpr std::size_t kMostCandidates = 20'000;  // boundaries that are considered
static_assert(kMostCandidates <= std::numeric_limits<std::uint16_t>::max());

/// The padding of any range of sizes, from sums over all sizes before each place where a bucket may
/// start. Whole numbers are exact up to 2^53.
class PaddingCosts {
 public:
  /// Adds a size, not below the ones before it; `start`: a bucket may start with it.
  void add(double size, double count, bool start) {
    if (start) {
      counts_.push_back(count_);
      sums_.push_back(sum_);
      longest_.push_back(size);
    }
    longest_.back() = size;
    count_ += count;
    sum_ += count * size;
  }

  void finish() {
    counts_.push_back(count_);
    sums_.push_back(sum_);
  }

  [[nodiscard]] std::size_t starts() const { return longest_.size(); }

  /// Of one bucket from start `first` up to the sizes that follow start `last`.
  [[nodiscard]] double operator()(std::size_t first, std::size_t last) const {
    return (counts_[last + 1] - counts_[first]) * longest_[last] - (sums_[last + 1] - sums_[first]);
  }

 private:
  std::vector<double> counts_, sums_;  // of all samples before a start
  std::vector<double> longest_;        // up to the next start
  double count_ = 0, sum_ = 0;
};

/// Fills one layer of the dynamic programme: `best[last]` is the least padding of all sizes up to
/// `last`, with one bucket more than `before`. A bucket that ends later never starts earlier in the
/// best division (the costs are Monge), so the middle one halves the starts that remain to be
/// tried.
struct Layer {
  const PaddingCosts& costs;
  const std::vector<double>& before;
  std::vector<double>& best;
  std::vector<std::uint16_t>& start;

  void fill(std::size_t low, std::size_t high, std::size_t start_low, std::size_t start_high) {
    if (low > high) {
      return;
    }
    const std::size_t middle = low + (high - low) / 2;
    std::size_t chosen = start_low;
    double least = before[start_low - 1] + costs(start_low, middle);
    for (std::size_t i = start_low + 1; i <= std::min(middle, start_high); ++i) {
      const double padding = before[i - 1] + costs(i, middle);
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
std::vector<std::size_t> best_starts(const PaddingCosts& costs, std::size_t buckets) {
  const std::size_t count = costs.starts();
  std::vector<double> before(count);
  std::vector<double> best(count);
  for (std::size_t last = 0; last < count; ++last) {
    before[last] = costs(0, last);
  }
  std::vector<std::vector<std::uint16_t>> starts(buckets);
  for (std::size_t k = 1; k < buckets; ++k) {
    check_interruption();
    starts[k].resize(count);
    // Bucket k needs one start for each bucket before it, and leaves one for each after it.
    const std::size_t high = count - buckets + k;
    Layer{costs, before, best, starts[k]}.fill(k, high, k, high);
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

/// Which sizes a bucket may start with: all, or if there are too many, those at which the samples
/// so far or the sizes pass another 20 000th part.
std::vector<std::size_t> candidates(const std::vector<double>& offsets,
                                    const std::vector<std::int64_t>& counts, std::size_t samples) {
  constexpr double kParts = static_cast<double>(kMostCandidates) / 2;
  std::vector<std::size_t> result;
  result.reserve(std::min(offsets.size(), kMostCandidates));
  std::int64_t seen = 0;
  std::array<double, 2> previous{-1.0, -1.0};
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    const std::array<double, 2> part{
        std::floor(static_cast<double>(seen) / static_cast<double>(samples) * kParts),
        std::min(std::floor(offsets[i] / offsets.back() * kParts), kParts - 1)};
    if (offsets.size() <= kMostCandidates || part != previous) {
      result.push_back(i);
    }
    previous = part;
    seen += counts[i];
  }
  return result;
}

/// Which sizes the buckets start with.
/// @param offsets distances of the distinct sizes from the smallest, ascending.
std::vector<std::size_t> bucket_starts(const std::vector<double>& offsets,
                                       const std::vector<std::int64_t>& counts, std::size_t samples,
                                       std::size_t buckets) {
  if (buckets == 1) {
    return {0};
  }
  std::vector<std::size_t> candidate = candidates(offsets, counts, samples);
  if (buckets >= candidate.size()) {
    return candidate;
  }
  PaddingCosts costs;
  std::size_t next = 0;
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    const bool start = next < candidate.size() && candidate[next] == i;
    costs.add(offsets[i], static_cast<double>(counts[i]), start);
    next += start ? 1 : 0;
  }
  costs.finish();
  std::vector<std::size_t> starts = best_starts(costs, buckets);
  std::transform(starts.begin(), starts.end(), starts.begin(),
                 [&](std::size_t start) { return candidate[start]; });
  return starts;
}

// Doubles are halved: the distance of two finite ones may pass the largest.
double distance(std::int64_t size, std::int64_t low) {
  return static_cast<double>(static_cast<std::uint64_t>(size) - static_cast<std::uint64_t>(low));
}
double distance(double size, double low) { return size / 2 - low / 2; }

template <typename Size>
std::vector<Size> least_padding(std::span<const Size> sizes, std::size_t buckets) {
  detail::require_sizes(sizes);
  detail::check_argument(buckets >= 1, "buckets=", buckets, detail::kNotAllowed, "at least 1");
  const detail::Distinct<Size> found = detail::distinct(sizes);
  std::vector<double> offsets(found.sizes.size());
  std::transform(found.sizes.begin(), found.sizes.end(), offsets.begin(),
                 [&](Size size) { return distance(size, found.sizes.front()); });
  if constexpr (std::is_same_v<Size, double>) {  // no overflow of sums
    const double range = offsets.back() > 0 ? offsets.back() : 1.0;
    std::transform(offsets.begin(), offsets.end(), offsets.begin(),
                   [=](double offset) { return offset / range; });
  }
  std::vector<Size> boundaries;
  if (buckets >= found.sizes.size()) {
    boundaries = found.sizes;  // one bucket per size: no padding at all
  } else {
    for (const std::size_t start : bucket_starts(offsets, found.counts, sizes.size(), buckets)) {
      boundaries.push_back(found.sizes[start]);
    }
  }
  boundaries.push_back(detail::just_above(found.sizes.back()));
  return boundaries;
}

}  // namespace

std::vector<std::int64_t> least_padding_boundaries(std::span<const std::int64_t> sizes,
                                                   std::size_t buckets) {
  return least_padding(sizes, buckets);
}

std::vector<double> least_padding_boundaries(std::span<const double> sizes, std::size_t buckets) {
  return least_padding(sizes, buckets);
}

}  // namespace brim::batching
