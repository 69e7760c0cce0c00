#include <brim/memory/release.h>

#include <algorithm>

#include "memory/backend.h"

namespace brim {

std::int64_t release_cached(c10::Device device) {
  const c10::Device resolved = resolve_device(device);
  DeviceBackend& backend = backend_for(resolved);
  const std::int64_t before = backend.stats(resolved).reserved;
  backend.release_cached(resolved);
  return std::max<std::int64_t>(before - backend.stats(resolved).reserved, 0);
}

Fragmentation fragmentation(c10::Device device) {
  const c10::Device resolved = resolve_device(device);
  const MemoryStats stats = backend_for(resolved).stats(resolved);
  Fragmentation result;
  result.usable = stats.free;
  if (!resolved.is_cpu() && stats.reserved > 0) {
    result.cached = std::max<std::int64_t>(stats.reserved - stats.allocated, 0);
    result.stuck = std::min(stats.inactive_split, result.cached);
    result.share = static_cast<double>(result.cached) / static_cast<double>(stats.reserved);
  }
  return result;
}

}  // namespace brim
