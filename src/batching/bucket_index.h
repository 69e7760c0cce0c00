#pragma once

#include <brim/batching/batches.h>
#include <brim/batching/sample_sizes.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace brim::batching::detail {

/// A sample and its size in one word, so that reading both waits for memory once.
struct SizedSample {
  std::uint32_t sample;
  std::uint32_t size;
};

/// Samples by bucket, ascending inside each: bucket b has those from begins[b] up to begins[b + 1].
struct BucketIndex {
  std::vector<double> boundaries;
  std::vector<std::size_t> begins;
  std::vector<std::uint32_t> samples;  ///< or, where sizes are wanted and fit:
  std::vector<SizedSample> sized_samples;

  [[nodiscard]] std::size_t buckets() const { return begins.size() - 1; }
  [[nodiscard]] std::size_t size(std::size_t bucket) const {
    return begins[bucket + 1] - begins[bucket];
  }
};

/// @throws std::invalid_argument unless there are two or more, ascending and finite but the last.
void check_boundaries(const std::vector<double>& boundaries);

/// Which bucket a size belongs to; one for those below the first and one for those beyond the last.
template <class T>
class BucketFinder {
 public:
  explicit BucketFinder(const std::vector<double>& boundaries) {
    for (const double boundary : boundaries) {
      if constexpr (std::is_same_v<T, double>) {
        edges_.push_back(boundary);
      } else if (boundary < 0x1p63) {  // no whole size reaches the others
        // A whole size lies below a fraction exactly when it lies below the next whole number.
        edges_.push_back(static_cast<T>(std::max(std::ceil(boundary), -0x1p62)));
      }
    }
    if constexpr (!std::is_same_v<T, double>) {
      if (!edges_.empty() && edges_.back() > 0 && edges_.back() <= kLargestTable) {
        fill_table();
      }
    }
  }

  /// 0 is below the first boundary, b + 1 is bucket b.
  [[nodiscard]] std::uint32_t operator()(T size) const {
    if constexpr (!std::is_same_v<T, double>) {
      if (static_cast<std::uint64_t>(size) < table_.size()) {
        return table_[static_cast<std::size_t>(size)];
      }
      if (!table_.empty()) {
        return static_cast<std::uint32_t>(edges_.size());
      }
    }
    return static_cast<std::uint32_t>(std::upper_bound(edges_.begin(), edges_.end(), size) -
                                      edges_.begin());
  }

 private:
  static constexpr std::int64_t kLargestTable = std::int64_t{1} << 16;

  void fill_table() {
    table_.resize(static_cast<std::size_t>(edges_.back()));
    std::uint32_t bucket = 0;
    for (std::size_t size = 0; size < table_.size(); ++size) {
      while (bucket < edges_.size() && edges_[bucket] <= static_cast<T>(size)) {
        ++bucket;
      }
      table_[size] = bucket;
    }
  }

  std::vector<T> edges_;
  std::vector<std::uint32_t> table_;
};

/// Sorts samples into buckets. Those in `oversize`, ascending, are in no bucket; those whose size
/// is in none are appended to `outside`.
/// @param costs sizes to keep beside the samples where they are whole and fit; may be empty.
template <class T>
[[nodiscard]] BucketIndex group(const SizeSpan<T>& sizes, const SizeSpan<T>& costs,
                                std::vector<double> boundaries,
                                const std::vector<LeftOut>& oversize,
                                std::vector<LeftOut>& outside);

}  // namespace brim::batching::detail
