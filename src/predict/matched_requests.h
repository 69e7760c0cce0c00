#pragma once

#include <brim/export.h>
#include <brim/predict/allocation_record.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace brim::detail {

/// By request: whether it is freed by the next event, as a library's workspace is.
[[nodiscard]] std::vector<bool> brief_requests(const AllocationRecord& record);

/// The requests of one call in the record of another, at a different size.
struct MatchedRequests {
  std::vector<std::int64_t> bytes;  ///< by request: those of the other; its own if it has none
  /// By request: bytes of the largest workspace that only the other record has after it.
  std::vector<std::int64_t> workspaces;
};

/// Empty if they are not the same requests. Libraries take a workspace at some sizes and none at
/// others; and what a first call made for good (an optimizer's state) is in one record only.
[[nodiscard]] BRIM_API std::optional<MatchedRequests> matched_requests(
    const AllocationRecord& record, double size, const AllocationRecord& other, double other_size);

}  // namespace brim::detail
