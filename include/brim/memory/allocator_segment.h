#pragma once

#include <cstdint>
#include <vector>

namespace brim {

/// Part of a segment. Bytes.
struct AllocatorBlock {
  std::int64_t address = 0;
  std::int64_t size = 0;
  std::int64_t requested = 0;  ///< 0 if it is free
  bool allocated = false;
};

/// Memory that a caching allocator took from the device in one piece; of an expandable segment, a
/// range of mapped pages. Bytes.
struct AllocatorSegment {
  std::int64_t address = 0;
  std::int64_t size = 0;
  std::int64_t stream = 0;             ///< any number that tells streams apart
  bool small = false;                  ///< for requests up to 1 MiB
  std::vector<AllocatorBlock> blocks;  ///< in the order of addresses, without gaps
};

}  // namespace brim
