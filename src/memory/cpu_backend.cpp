#include <brim/memory/host_memory.h>
#include <malloc.h>

#include <algorithm>

#include "memory/backend.h"
#include "memory/host_room.h"

namespace brim {
namespace {

/// What the budget leaves of this many free bytes.
std::int64_t within_budget(std::int64_t free, std::int64_t allocated) {
  return std::min(free, std::max<std::int64_t>(CpuAllocator::instance().limit() - allocated, 0));
}

class CpuBackend final : public DeviceBackend {
 public:
  MemoryStats stats(c10::Device /*device*/) override {
    const HostMemory host = read_host_memory();
    const CpuAllocator& allocator = CpuAllocator::instance();
    MemoryStats stats;
    stats.allocated = allocator.allocated();
    stats.peak = allocator.peak().peak;
    stats.reserved = host.resident;
    stats.limit = std::min(host.limit(), allocator.limit());
    stats.free = within_budget(host.available(), stats.allocated);
    stats.reservable = stats.allocated + stats.free;
    return stats;
  }

  void prepare(c10::Device /*device*/) override { CpuAllocator::instance().install(); }

  Room headroom(c10::Device /*device*/) override {
    const std::int64_t allocated = CpuAllocator::allocated();
    const std::int64_t free = within_budget(recent_host_room(allocated), allocated);
    return {.allocated = allocated, .free = free, .reservable = allocated + free};
  }

  PeakReading peak(c10::Device /*device*/) override { return CpuAllocator::instance().peak(); }

  PeakReading take_peak(c10::Device /*device*/) override {
    return CpuAllocator::instance().take_peak();
  }

  AllocationGates* gates() override {
    return CpuAllocator::try_install() ? &CpuAllocator::instance().gates() : nullptr;
  }

  EventLog* log() override { return &CpuAllocator::instance().log(); }

  LiveBlocks* live_blocks() override { return &CpuAllocator::instance().live_blocks(); }

  void set_limit(c10::Device /*device*/, std::optional<std::int64_t> bytes) override {
    CpuAllocator::instance().set_limit(bytes.value_or(CpuAllocator::kUnlimited));
  }

  void release_cached(c10::Device /*device*/) override {
#if defined(__GLIBC__)
    malloc_trim(0);  // torch keeps no cache on the CPU, but the C library does
#endif
  }
};

}  // namespace

DeviceBackend& cpu_backend() {
  static auto* const backend = new CpuBackend;
  return *backend;
}

}  // namespace brim
