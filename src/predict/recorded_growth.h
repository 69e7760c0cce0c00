#pragma once

#include <brim/export.h>
#include <brim/predict/allocation_record.h>
#include <brim/predict/allocator_model.h>
#include <brim/predict/attempt.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "predict/request_growth.h"

namespace brim::detail {

/// How work fills an allocator that hands out blocks, from records of its requests: which size fits
/// is found by replaying them, each as large as it would be at that size, from where the blocks of
/// the device lie now. Pure logic.
///
/// Bytes alone do not tell: blocks that do not fit into each other run out of memory at 70 to 99 %
/// of it, and only the order of requests shows at which. Nor does an empty device: what a call
/// leaves (gradients) lies between the blocks of the next.
class BRIM_API RecordedGrowth {
 public:
  /// From the last fit, and another one at a similar size if its requests are the same ones.
  /// Empty if the last fit has no record.
  static std::optional<RecordedGrowth> of(std::span<const Attempt> attempts);

  /// Whether two sizes were recorded. Else all requests are taken to grow in proportion.
  [[nodiscard]] bool knows_growth() const { return other_size_ > 0; }
  /// Of the last fit.
  [[nodiscard]] double size() const { return size_; }

  /// Bytes that a call at `size` needs where every request takes its own, as Attempt::need().
  [[nodiscard]] double need_at(double size) const;
  /// The largest size that needs at most `bytes` there, where `high` stands for all that are
  /// larger; 0 if none does.
  [[nodiscard]] std::int64_t largest_within(double bytes, std::int64_t high) const;

  /// Where the next call begins. False if the last fit's record is out of date: what it left, and
  /// what the next call will free, has moved.
  bool begin_from(const AllocatorModel& now);

  /// Whether the next calls fit at `size`. If it is another size than the last, they begin with an
  /// empty cache.
  [[nodiscard]] bool fits(double size) const;

  /// A large size above `low` and up to `high` that fits; 0 if none is found.
  [[nodiscard]] double largest_between(double low, double high) const;

 private:
  class Device;

  RecordedGrowth(const Attempt& newest, bool goes_on_refused);
  void compare(const Attempt& other);
  [[nodiscard]] std::int64_t workspace_after(std::size_t request, double size) const;
  /// The least and the most that a call holds, as seen from where it begins. Without requests that
  /// may be refused.
  struct Held {
    double least = 0;
    double most = 0;
  };
  [[nodiscard]] Held held_at(double size) const;

  const AllocationRecord* record_;
  double size_;
  bool goes_on_refused_;
  double other_size_ = 0;                 // 0: no other record is known
  std::vector<RequestGrowth> growth_;     // by request
  std::vector<std::int64_t> workspaces_;  // by request: of the other record
  double apart_ = 0;                      // how many times as large, if it is similar
  std::vector<bool> optional_;            // requests that may be refused
  std::vector<std::size_t> successor_;    // by older request; see the constructor
  AllocatorModel now_;
  std::vector<std::int64_t> left_;  // by request: the allocation that the last call left; -1: none
};

}  // namespace brim::detail
