#pragma once

#include <cstdint>

namespace brim {

/// Something that an allocator did for its caller.
struct AllocationEvent {
  std::uintptr_t address = 0;
  std::int64_t bytes = 0;       ///< asked for, without what the allocator adds
  std::int64_t stream = 0;      ///< any number that tells streams apart
  std::int32_t operation = -1;  ///< the number of the operator that ran; -1: not known
  std::uint64_t name = 0;       ///< its name, as a hash
  std::uint64_t path = 0;       ///< with the names of those inside it
  bool freed = false;           ///< else allocated
  bool refused = false;         ///< asked for in vain
};

}  // namespace brim
