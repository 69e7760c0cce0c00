#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace brim::batching::detail {

/// Which samples each bucket holds, ascending.
class BucketMembers {
 public:
  BucketMembers() = default;
  virtual ~BucketMembers() = default;
  BucketMembers(const BucketMembers&) = delete;
  BucketMembers& operator=(const BucketMembers&) = delete;

  [[nodiscard]] virtual std::size_t buckets() const = 0;
  /// The number of samples in a bucket.
  [[nodiscard]] virtual std::size_t size(std::size_t bucket) const = 0;
  /// Writes the samples at these places of a bucket to `out`.
  virtual void read(std::size_t bucket, std::span<const std::uint32_t> places,
                    std::int64_t* out) const = 0;
};

}  // namespace brim::batching::detail
