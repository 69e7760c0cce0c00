#pragma once

#include <brim/batching/batches.h>
#include <brim/batching/interruption.h>
#include <brim/batching/sample_sizes.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "check_argument.h"

namespace brim::batching::detail {

using brim::detail::check_argument;

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

/// Samples by bucket, ascending inside each.
///
/// Two bytes per sample: the lower half of its index. The upper half is the segment of 2^16 samples
/// that it lies in, found in a table of how many samples of the bucket each segment ends with. With
/// so many buckets that this table would be larger than the samples, whole indices are kept
/// instead: four bytes.
class BucketIndex {
 public:
  /// @param bucket_at the bucket of sample i; the number of buckets or more for none. Asked twice
  /// for
  ///     each sample, in ascending order.
  template <class BucketAt>
  BucketIndex(std::size_t buckets, std::size_t samples, const BucketAt& bucket_at)
      : begins_(buckets + 1), segments_((samples + kSegment - 1) / kSegment) {
    const bool narrow = segments_ * buckets * sizeof(std::uint32_t) <= 2 * samples;
    if (narrow) {
      ends_.resize(segments_ * buckets);
    }
    std::vector<std::uint32_t> counts(buckets);
    for (std::size_t i = 0; i < samples; ++i) {
      if (const std::uint32_t bucket = bucket_at(i); bucket < buckets) {
        ++counts[bucket];
      }
      if (i + 1 == samples || (i + 1) % kSegment == 0) {
        check_interruption();
        for (std::size_t b = 0; narrow && b < buckets; ++b) {
          ends_[b * segments_ + i / kSegment] = counts[b];
        }
      }
    }
    std::partial_sum(counts.begin(), counts.end(), begins_.begin() + 1, std::plus<std::size_t>());
    (narrow ? static_cast<void>(low_.resize(begins_.back())) : whole_.resize(begins_.back()));
    std::vector<std::size_t> next(begins_.begin(), begins_.end() - 1);
    for (std::size_t i = 0; i < samples; ++i) {
      const std::uint32_t bucket = bucket_at(i);
      if (bucket >= buckets) {
        continue;
      }
      const std::size_t place = next[bucket]++;
      if (narrow) {
        low_[place] = static_cast<std::uint16_t>(i % kSegment);
      } else {
        whole_[place] = static_cast<std::uint32_t>(i);
      }
      if (place % kSegment == 0) {
        check_interruption();
      }
    }
  }

  [[nodiscard]] std::size_t buckets() const { return begins_.size() - 1; }
  /// COUNT of samples in a bucket.
  [[nodiscard]] std::size_t size(std::size_t bucket) const {
    return begins_[bucket + 1] - begins_[bucket];
  }

  /// Writes the samples at these places of a bucket to `out`.
  void read(std::size_t bucket, std::span<const std::uint32_t> places, std::int64_t* out) const {
    // Loops of little but loads: each misses the cache, and many can be in flight at once.
    if (low_.empty()) {
      const std::uint32_t* const samples = whole_.data() + begins_[bucket];
      for (const std::uint32_t place : places) {
        *out++ = samples[place];
      }
      return;
    }
    const std::uint16_t* const low = low_.data() + begins_[bucket];
    const SegmentFinder segment_of({ends_.data() + bucket * segments_, segments_});
    for (const std::uint32_t place : places) {
      *out++ = static_cast<std::int64_t>(segment_of(place) * kSegment + low[place]);
    }
  }

 private:
  static constexpr std::size_t kSegment = std::size_t{1} << 16;

  /// Finds the segment of a place. Buckets are often spread evenly over all samples: then the first
  /// guess is right or next to it.
  class SegmentFinder {
   public:
    explicit SegmentFinder(std::span<const std::uint32_t> ends)
        : ends_(ends),
          per_place_(static_cast<double>(ends.size()) / std::max<std::uint32_t>(ends.back(), 1)) {}

    [[nodiscard]] std::size_t operator()(std::uint32_t place) const {
      const auto guess = static_cast<std::size_t>(place * per_place_);
      const std::size_t first = guess > 0 ? guess - 1 : 0;
      if (first + 3 <= ends_.size() && (first == 0 || ends_[first - 1] <= place) &&
          place < ends_[first + 2]) {
        return first + static_cast<std::size_t>(ends_[first] <= place) +
               static_cast<std::size_t>(ends_[first + 1] <= place);
      }
      return static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), place) -
                                      ends_.begin());
    }

   private:
    std::span<const std::uint32_t> ends_;
    double per_place_;
  };

  std::vector<std::size_t> begins_;  // of buckets among all samples
  std::size_t segments_;
  std::vector<std::uint32_t> ends_;  // COUNT of a bucket's samples up to the end of each segment
  std::vector<std::uint16_t> low_;
  std::vector<std::uint32_t> whole_;  // instead of the two above
};

/// Sorts samples into buckets. Those in `oversize`, ascending, are in no bucket; those whose size
/// is in none are appended to `outside`.
template <class T>
[[nodiscard]] BucketIndex group(const SizeSpan<T>& sizes, const BucketFinder<T>& find,
                                std::size_t buckets, const std::vector<LeftOut>& oversize,
                                std::vector<LeftOut>& outside) {
  auto next_oversize = oversize.begin();
  bool first_pass = true;
  return sizes.visit([&](auto stored) {
    return BucketIndex(buckets, stored.size(), [&](std::size_t i) {
      auto bucket = find(static_cast<T>(stored[i]));
      if (next_oversize != oversize.end() && std::cmp_equal(next_oversize->index, i)) {
        ++next_oversize;
        bucket = static_cast<std::uint32_t>(buckets);
      } else if (first_pass && bucket >= buckets) {
        outside.push_back({static_cast<std::int64_t>(i), LeftOutReason::outside_buckets});
      }
      if (i + 1 == stored.size()) {  // once more from the beginning
        next_oversize = oversize.begin();
        first_pass = false;
      }
      return bucket;
    });
  });
}

}  // namespace brim::batching::detail
