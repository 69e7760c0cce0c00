#pragma once

#include <brim/export.h>
#include <brim/predict/allocation_record.h>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace brim::detail {

/// What work needs that goes through its items in parts of the size and keeps their results, as
/// torch.cat([f(part) for part in x.split(size)]) does. Its need does not grow along a line or
/// even steadily: it falls where there is one part less. Pure logic.
///
/// Every part makes the same requests, in proportion to its items. So one record shows how much a
/// part needs while it runs, how much it leaves, and how many items there are: how far the last
/// part, which is shorter, is from a full one.
class BRIM_API PartsNeed {
 public:
  /// From records at two sizes. Empty if they do not look like parts, which takes three of them at
  /// the smaller size, or if what is made of one does not explain the other.
  static std::optional<PartsNeed> of(const AllocationRecord& record, std::int64_t size,
                                     const AllocationRecord& other, std::int64_t other_size);

  /// Bytes, as Attempt::need().
  [[nodiscard]] double need_at(double size) const;
  /// A large size up to `high` that needs at most `bytes`, as does a slightly larger one (see
  /// largest_less_spared); 0 if there is none.
  [[nodiscard]] std::int64_t largest_within(double bytes, std::int64_t high) const;

 private:
  PartsNeed() = default;

  double size_ = 0;     // of a full part
  double parts_ = 0;    // COUNT of full parts that would hold all items
  double outside_ = 0;  // bytes that are there before the first part
  double runs_ = 0;     // bytes of a full part while it runs
  double lingers_ = 0;  // bytes of one that are still there when the next one begins
  double meets_ = 0;    // bytes of a full part while it runs, with those
  double leaves_ = 0;   // bytes of one that stay
  double ends_ = 0;     // bytes at most after the last part
};

}  // namespace brim::detail
