#pragma once

#include <brim/batching/batches.h>
#include <brim/batching/sample_sizes.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "check_argument.h"

namespace brim::batching::detail {

using brim::detail::check_argument;

/// A sample and its size in one word, so that reading both waits for memory once.
struct SizedSample {
  std::uint32_t sample;
  std::uint32_t size;
};

/// Samples by bucket, ascending inside each: bucket b has those from begins[b] up to begins[b + 1].
struct BucketIndex {
  std::vector<double> boundaries;
  std::vector<std::size_t> begins;
  std::vector<std::uint32_t> samples;  ///< or, if sizes are wanted and fit:
  std::vector<SizedSample> sized_samples;

  [[nodiscard]] std::size_t buckets() const { return begins.size() - 1; }
  [[nodiscard]] std::size_t size(std::size_t bucket) const {
    return begins[bucket + 1] - begins[bucket];
  }
};

/// @throws std::invalid_argument unless there are two or more, ascending and, but for the last one,
///     finite.
inline void check_boundaries(const std::vector<double>& boundaries) {
  check_argument(boundaries.size() >= 2, "bucket_boundaries must be at least two, got ",
                 boundaries.size());
  for (std::size_t i = 0; i < boundaries.size(); ++i) {
    const bool allowed =
        std::isfinite(boundaries[i]) || (i + 1 == boundaries.size() && boundaries[i] > 0);
    check_argument(allowed && (i == 0 || boundaries[i] > boundaries[i - 1]),
                   "bucket_boundaries must be finite and ascending, got ", boundaries[i],
                   " at index ", i);
  }
}

/// Boundaries as numbers of T, at or above which a size lies exactly if it does for the boundary.
template <class T>
[[nodiscard]] std::vector<T> edges_of(const std::vector<double>& boundaries) {
  if constexpr (std::is_same_v<T, double>) {
    return boundaries;
  } else {
    std::vector<T> edges;
    for (const double boundary : boundaries) {
      if (boundary < 0x1p63) {  // no whole size reaches the others
        // A whole size lies below a fraction exactly if it lies below the next whole number.
        edges.push_back(static_cast<T>(std::max(std::ceil(boundary), -0x1p62)));
      }
    }
    return edges;
  }
}

/// Finds the bucket of a size.
template <class T>
class BucketFinder {
 public:
  explicit BucketFinder(std::vector<T> edges) : edges_(std::move(edges)) {
    if constexpr (!std::is_same_v<T, double>) {
      if (!edges_.empty() && edges_.back() > 0 && edges_.back() <= kLargestTable) {
        fill_table();
      }
    }
  }

  /// b for bucket b; below the first boundary 2^32 - 1, beyond the last one at least the number of
  /// buckets.
  [[nodiscard]] std::uint32_t operator()(T size) const {
    if constexpr (!std::is_same_v<T, double>) {
      if (static_cast<std::uint64_t>(size) < table_.size()) {
        return table_[static_cast<std::size_t>(size)];
      }
    }
    const auto above = std::upper_bound(edges_.begin(), edges_.end(), size);
    return static_cast<std::uint32_t>(above - edges_.begin()) - 1;
  }

 private:
  static constexpr std::int64_t kLargestTable = std::int64_t{1} << 16;

  void fill_table() {
    table_.resize(static_cast<std::size_t>(edges_.back()));
    std::uint32_t edge = 0;
    for (std::size_t size = 0; size < table_.size(); ++size) {
      while (edge < edges_.size() && edges_[edge] <= static_cast<T>(size)) {
        ++edge;
      }
      table_[size] = edge - 1;
    }
  }

  std::vector<T> edges_;
  std::vector<std::uint32_t> table_;
};

/// A counting sort by bucket.
class BucketSort {
 public:
  explicit BucketSort(std::size_t buckets) : begins_(buckets + 2) {}

  /// @param bucket_at the bucket of sample i; the number of buckets or more for none.
  template <class BucketAt>
  void count(std::size_t samples, const BucketAt& bucket_at) {
    const auto none = static_cast<std::uint32_t>(begins_.size() - 2);
    bucket_of_.resize(samples);
    for (std::size_t i = 0; i < samples; ++i) {
      bucket_of_[i] = std::min(bucket_at(i), none);
      ++begins_[bucket_of_[i] + 1];
    }
    begins_.pop_back();
    std::partial_sum(begins_.begin(), begins_.end(), begins_.begin());
  }

  /// Where each bucket begins, and the COUNT of all samples that are in one.
  [[nodiscard]] const std::vector<std::size_t>& begins() const { return begins_; }

  /// Calls `put(place, i)` for each sample in a bucket, in ascending order inside it.
  template <class Put>
  void scatter(const Put& put) const {
    std::vector<std::size_t> next = begins_;
    for (std::size_t i = 0; i < bucket_of_.size(); ++i) {
      if (bucket_of_[i] + 1 < next.size()) {
        put(next[bucket_of_[i]]++, i);
      }
    }
  }

 private:
  std::vector<std::size_t> begins_;
  std::vector<std::uint32_t> bucket_of_;
};

/// Whether there are sizes, all of which fit 32 bits.
template <class T>
[[nodiscard]] bool fit_word(const SizeSpan<T>& sizes) {
  return sizes.visit([]<class Stored>(std::span<const Stored> stored) {
    if constexpr (std::is_floating_point_v<Stored>) {
      return false;
    } else {
      std::int64_t bits = 0;
      for (const std::int64_t size : stored) {  // NOLINT(bugprone-signed-char-misuse): a number
        bits |= size;
      }
      return !stored.empty() && std::in_range<std::uint32_t>(bits);
    }
  });
}

/// Sorts samples into buckets. Those in `oversize`, ascending, are in no bucket; those whose size
/// is in none are appended to `outside`.
/// @param costs sizes to keep beside the samples if they are whole and fit; may be empty.
template <class T>
[[nodiscard]] BucketIndex group(const SizeSpan<T>& sizes, const SizeSpan<T>& costs,
                                const BucketFinder<T>& find, std::vector<double> boundaries,
                                const std::vector<LeftOut>& oversize,
                                std::vector<LeftOut>& outside) {
  BucketIndex index{std::move(boundaries), {}, {}, {}};
  const std::size_t buckets = index.boundaries.size() - 1;
  BucketSort sort(buckets);
  auto next_oversize = oversize.begin();
  sizes.visit([&](auto stored) {
    sort.count(stored.size(), [&](std::size_t i) {
      if (next_oversize != oversize.end() && std::cmp_equal(next_oversize->index, i)) {
        ++next_oversize;
        return static_cast<std::uint32_t>(buckets);
      }
      const std::uint32_t bucket = find(static_cast<T>(stored[i]));
      if (bucket >= buckets) {
        outside.push_back({static_cast<std::int64_t>(i), LeftOutReason::outside_buckets});
      }
      return bucket;
    });
  });
  index.begins = sort.begins();
  if (fit_word(costs)) {
    index.sized_samples.resize(index.begins.back());
    costs.visit([&](auto stored) {
      sort.scatter([&](std::size_t place, std::size_t i) {
        index.sized_samples[place] = {static_cast<std::uint32_t>(i),
                                      static_cast<std::uint32_t>(stored[i])};
      });
    });
  } else {
    index.samples.resize(index.begins.back());
    sort.scatter([&](std::size_t place, std::size_t i) {
      index.samples[place] = static_cast<std::uint32_t>(i);
    });
  }
  return index;
}

}  // namespace brim::batching::detail
