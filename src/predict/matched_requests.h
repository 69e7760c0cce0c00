#pragma once

#include <brim/export.h>
#include <brim/predict/allocation_record.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace brim::detail {

/// The requests of one call in the record of another, at a different size.
struct MatchedRequests {
  /// One that only the other record has, freed at once: a library's workspace.
  struct Temporary {
    std::size_t after;  ///< the request of `record` that comes before it
    std::int64_t bytes;
  };

  std::vector<std::int64_t> bytes;       ///< by request: those of the other; its own if it has none
  std::vector<Temporary> only_in_other;  ///< in ascending order
};

/// Empty if they are not the same requests. Libraries take a workspace at some sizes and none at
/// others; and what a first call made for good (an optimizer's state) is in one record only.
[[nodiscard]] BRIM_API std::optional<MatchedRequests> matched_requests(
    const AllocationRecord& record, double size, const AllocationRecord& other, double other_size);

}  // namespace brim::detail
