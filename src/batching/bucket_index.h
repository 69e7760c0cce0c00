#pragma once

#include <brim/batching/batches.h>
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

#include "batching/bucket_members.h"
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
/// Two bytes per sample: how far it lies behind the first of its group of 128 samples of the
/// bucket. Where a group lies so far apart that two bytes do not reach, the bucket holds a small
/// part of all samples, and their whole indices are kept: four bytes.
class BucketIndex : public BucketMembers {
 public:
  /// @param bucket_at the bucket of sample i; the number of buckets or more for none. Asked twice
  ///     for each sample, in ascending order.
  template <class BucketAt>
  BucketIndex(std::size_t buckets, std::size_t samples, const BucketAt& bucket_at)
      : buckets_(buckets) {
    std::vector<std::uint32_t> first(buckets);  // of the latest group
    for (std::size_t i = 0; i < samples; ++i) {
      if (i % kBetweenChecks == 0) {
        check_interruption();
      }
      if (const std::uint32_t b = bucket_at(i); b < buckets) {
        Bucket& bucket = buckets_[b];
        if (bucket.count++ % kGroup == 0) {
          first[b] = static_cast<std::uint32_t>(i);
        }
        bucket.narrow &= i - first[b] <= kReach;
      }
    }
    std::size_t narrow = 0;
    std::size_t groups = 0;
    std::size_t wide = 0;
    for (Bucket& bucket : buckets_) {
      bucket.begin = bucket.narrow ? narrow : wide;
      bucket.groups = groups;
      (bucket.narrow ? narrow : wide) += bucket.count;
      groups += bucket.narrow ? (bucket.count + kGroup - 1) / kGroup : 0;
    }
    behind_.resize(narrow);
    firsts_.resize(groups);
    whole_.resize(wide);
    std::vector<std::uint32_t> placed(buckets);  // the number of samples
    for (std::size_t i = 0; i < samples; ++i) {
      if (i % kBetweenChecks == 0) {
        check_interruption();
      }
      const std::uint32_t b = bucket_at(i);
      if (b >= buckets) {
        continue;
      }
      const Bucket& bucket = buckets_[b];
      const auto sample = static_cast<std::uint32_t>(i);
      const std::size_t place = placed[b]++;
      if (!bucket.narrow) {
        whole_[bucket.begin + place] = sample;
        continue;
      }
      std::uint32_t& group = firsts_[bucket.groups + place / kGroup];
      group = place % kGroup == 0 ? sample : group;
      behind_[bucket.begin + place] = static_cast<std::uint16_t>(sample - group);
    }
  }

  [[nodiscard]] std::size_t buckets() const override { return buckets_.size(); }
  [[nodiscard]] std::size_t size(std::size_t bucket) const override {
    return buckets_[bucket].count;
  }

  void read(std::size_t bucket, std::span<const std::uint32_t> places,
            std::int64_t* out) const override {
    const Bucket& from = buckets_[bucket];
    // Loops of little but loads: each misses the cache, and many can be in flight at once.
    if (from.narrow) {
      const std::uint16_t* const behind = behind_.data() + from.begin;
      const std::uint32_t* const firsts = firsts_.data() + from.groups;
      for (const std::uint32_t place : places) {
        *out++ = std::int64_t{firsts[place / kGroup]} + behind[place];
      }
    } else {
      const std::uint32_t* const samples = whole_.data() + from.begin;
      for (const std::uint32_t place : places) {
        *out++ = samples[place];
      }
    }
  }

 private:
  static constexpr std::size_t kGroup = 128;
  static constexpr std::size_t kReach = std::numeric_limits<std::uint16_t>::max();
  // The number of samples between two checks for an interruption: some milliseconds.
  static constexpr std::size_t kBetweenChecks = std::size_t{1} << 20;

  struct Bucket {
    std::size_t count = 0;   // the number of samples
    std::size_t begin = 0;   // in behind_ or in whole_
    std::size_t groups = 0;  // where its groups begin in firsts_
    bool narrow = true;
  };

  std::vector<Bucket> buckets_;
  std::vector<std::uint16_t> behind_;  // of samples in narrow buckets
  std::vector<std::uint32_t> firsts_;  // samples of groups
  std::vector<std::uint32_t> whole_;   // samples of other buckets
};

/// Sorts samples into buckets. Those in `oversize`, ascending, are in no bucket; those whose size
/// is in none are appended to `outside`.
template <class T>
[[nodiscard]] std::unique_ptr<BucketIndex> group(const SizeSpan<T>& sizes,
                                                 const BucketFinder<T>& find, std::size_t buckets,
                                                 const std::vector<LeftOut>& oversize,
                                                 std::vector<LeftOut>& outside) {
  auto next_oversize = oversize.begin();
  bool first_pass = true;
  return sizes.visit([&](auto stored) {
    return std::make_unique<BucketIndex>(buckets, stored.size(), [&](std::size_t i) {
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
