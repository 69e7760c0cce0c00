#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "batching/bucket_members.h"
#include "batching/permutation.h"
#include "batching/sample_table.h"

namespace brim::batching::detail {

/// Reads one bucket, in order or in a random one. Reads some hundred samples ahead at once, which
/// waits for memory much less than one by one.
template <class T>
class BucketReader {
 public:
  /// Keeps references to both.
  /// @param table where the sizes are; null if they are not needed.
  BucketReader(const BucketMembers& index, std::size_t bucket, const SampleTable<T>* table,
               bool shuffle, std::uint64_t seed)
      : index_(&index),
        bucket_(bucket),
        count_(index.size(bucket)),
        table_(table),
        width_(table == nullptr ? 0 : table->columns().size()),
        shuffle_(shuffle) {
    if (shuffle) {
      permutation_ = Permutation(count_, seed);
    }
  }

  /// The number of samples in the bucket.
  [[nodiscard]] std::int64_t size() const { return static_cast<std::int64_t>(count_); }
  /// The number of samples taken so far.
  [[nodiscard]] std::int64_t taken() const { return static_cast<std::int64_t>(taken_); }

  /// Makes the next `count` samples, or all remaining ones, readable. Returns how many are.
  std::size_t look_ahead(std::size_t count) {
    if (samples_.size() - at_ < count && taken_ + samples_.size() - at_ < count_) {
      refill(count);
    }
    return samples_.size() - at_;
  }

  /// What is readable and not yet taken. Sizes: one per column, sample after sample.
  [[nodiscard]] std::span<const std::int64_t> samples() const {
    return std::span(samples_).subspan(at_);
  }
  [[nodiscard]] const T* sizes() const { return sizes_.data() + at_ * width_; }

  void take(std::size_t count) {
    at_ += count;
    taken_ += count;
  }

  void seek(std::int64_t taken) {
    taken_ = static_cast<std::size_t>(taken);
    at_ = 0;
    samples_.clear();
    sizes_.clear();
  }

 private:
  static constexpr std::size_t kAhead = 256;

  void refill(std::size_t count) {
    samples_.erase(samples_.begin(), samples_.begin() + static_cast<std::ptrdiff_t>(at_));
    sizes_.erase(sizes_.begin(), sizes_.begin() + static_cast<std::ptrdiff_t>(at_ * width_));
    at_ = 0;
    const std::size_t kept = samples_.size();
    const std::size_t first = taken_ + kept;
    const std::size_t more = std::min(std::max(count, kept + kAhead) - kept, count_ - first);
    places_.resize(more);
    if (shuffle_) {
      permutation_.read(first, std::span(places_));
    } else {
      std::iota(places_.begin(), places_.end(), static_cast<std::uint32_t>(first));
    }
    samples_.resize(kept + more);
    sizes_.resize((kept + more) * width_);
    index_->read(bucket_, places_, samples_.data() + kept);
    if (table_ != nullptr) {
      table_->gather(std::span(samples_).subspan(kept), std::span(sizes_).subspan(kept * width_));
    }
  }

  const BucketMembers* index_;
  std::size_t bucket_;
  std::size_t count_;
  const SampleTable<T>* table_;
  std::size_t width_;
  bool shuffle_;
  Permutation permutation_;
  std::size_t taken_ = 0;
  std::size_t at_ = 0;  // of the next sample in samples_
  std::vector<std::uint32_t> places_;
  std::vector<std::int64_t> samples_;
  std::vector<T> sizes_;
};

}  // namespace brim::batching::detail
