#pragma once

#include <brim/export.h>
#include <brim/memory/allocation_event.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

namespace brim {

/// What a piece of work asked its allocator for and gave back, in order. Records at two sizes show
/// how each request grows, and with it what the allocator will do at a third size.
class BRIM_API AllocationRecord {
 public:
  struct Request {
    std::int64_t bytes = 0;
    std::int64_t stream = 0;
    std::int64_t address = 0;  ///< where the block lay
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

  /// SUM of the bytes that took the place of what was held before, and stay: what a next call will
  /// free too. The first request of as many bytes takes the place (a gradient), also a temporary,
  /// and not what is made later (an optimizer's state): better too few bytes than too many.
  [[nodiscard]] std::int64_t replaced() const;

  /// The size that `choose` returns, or that it returned last if it was asked the same: most calls
  /// ask the same, and it takes milliseconds. Threads may call it at once.
  /// @param high the largest size that is allowed.
  /// @param available bytes that the work may use.
  std::optional<std::int64_t> chosen(
      std::int64_t high, double available,
      const std::function<std::optional<std::int64_t>()>& choose) const;

 private:
  mutable std::mutex mutex_{};
  mutable std::int64_t high_ = 0;  // as it was asked last
  mutable double available_ = -1;
  mutable std::optional<std::int64_t> chosen_{};
};

/// @param events at most 2^30 of them.
/// @param fitted whether the work ended well, and not with the last request that was refused.
[[nodiscard]] BRIM_API std::shared_ptr<const AllocationRecord> record_of(
    std::span<const AllocationEvent> events, bool fitted = true);

}  // namespace brim
