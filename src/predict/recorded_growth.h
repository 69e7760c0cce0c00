#pragma once

#include <brim/export.h>
#include <brim/predict/allocation_record.h>
#include <brim/predict/allocator_model.h>
#include <brim/predict/attempt.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace brim::detail {

/// How work fills an allocator that hands out blocks, from records of its requests: which size fits
/// is found by replaying them, each as large as it would be at that size. Pure logic.
///
/// Bytes alone do not tell: blocks that do not fit into each other run out of memory at 70 to 99 %
/// of it, and only the order of requests shows at which.
class BRIM_API RecordedGrowth {
 public:
  /// From the newest fit that has a record, and another one at a different size if its requests are
  /// the same ones. Empty without a record.
  static std::optional<RecordedGrowth> of(std::span<const Attempt> attempts);

  /// Whether two sizes were recorded. Else all requests are taken to grow in proportion.
  [[nodiscard]] bool knows_growth() const { return other_ != nullptr; }
  /// Whether the work frees what the call before left.
  [[nodiscard]] bool frees_older() const { return record_->older != 0; }

  /// Whether calls at `size` fit, the first of which finds an empty cache.
  /// @param available bytes that the work may use.
  [[nodiscard]] bool fits(double size, double available, const AllocatorOptions& options) const;

  /// The largest size from `low` to `high` below which those nearby fit too; `low` if none does.
  [[nodiscard]] double largest(double low, double high, double available,
                               const AllocatorOptions& options) const;

 private:
  class Device;

  RecordedGrowth(const Attempt& newest, const Attempt* other, bool goes_on_refused);
  [[nodiscard]] std::int64_t bytes_at(std::size_t request, double size) const;
  [[nodiscard]] double search(double low, double high, double available,
                              const AllocatorOptions& options) const;

  const AllocationRecord* record_;
  const AllocationRecord* other_ = nullptr;
  double size_;
  double other_size_ = 0;
  std::vector<std::int64_t> other_bytes_;  // of the same requests
  std::vector<bool> optional_;             // requests that may be refused
};

}  // namespace brim::detail
