#pragma once

#include <brim/export.h>
#include <brim/memory/allocation_event.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

namespace brim {

/// What a piece of work asked its allocator for and gave back, in order. Records at two sizes show
/// how each request grows, and with it what the allocator will do at a third size.
struct AllocationRecord {
  struct Request {
    std::int64_t bytes = 0;
    std::int64_t stream = 0;
    bool freed = false;
  };

  std::vector<Request> requests;
  /// The first so many of them were held before the work, which freed them.
  std::size_t older = 0;
  /// n: the request n is made; ~n: it is freed.
  std::vector<std::int32_t> events;
  /// Whether it went on after a request had been refused: a library that can do with a smaller
  /// workspace, as cuDNN.
  bool goes_on_refused = false;
  /// Bytes that were reserved before the work, with an empty cache, beyond Attempt::held.
  std::int64_t outside = 0;

  /// The last answer of RecordedGrowth::largest: most calls ask the same, and it takes
  /// milliseconds.
  struct Answer {
    const AllocationRecord* other = nullptr;
    double low = 0, high = 0, available = 0, size = 0;
  };
  mutable Answer last{};
  mutable std::mutex mutex{};  ///< of `last`
};

/// @param events at most 2^30 of them.
/// @param fitted whether the work ended well, and not with the last request that was refused.
[[nodiscard]] BRIM_API std::shared_ptr<const AllocationRecord> record_of(
    std::span<const AllocationEvent> events, std::int64_t outside, bool fitted = true);

}  // namespace brim
