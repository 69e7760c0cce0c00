#include <brim/memory/host_memory.h>
#include <malloc.h>

#include <algorithm>

#include "memory/backend.h"
#include "memory/host_room.h"

namespace brim {
namespace {

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
    const std::int64_t left_of_budget =
        std::max<std::int64_t>(allocator.limit() - stats.allocated, 0);
    stats.free = std::min(host.available(), left_of_budget);
    return stats;
  }

  void prepare(c10::Device /*device*/) override { CpuAllocator::instance().install(); }

  Room headroom(c10::Device /*device*/) override {
    const CpuAllocator& allocator = CpuAllocator::instance();
    const std::int64_t allocated = allocator.allocated();
    const std::int64_t left_of_budget = std::max<std::int64_t>(allocator.limit() - allocated, 0);
    return {.allocated = allocated, .free = std::min(recent_host_room(allocated), left_of_budget)};
  }

  PeakReading peak(c10::Device /*device*/) override { return CpuAllocator::instance().peak(); }

  PeakReading take_peak(c10::Device /*device*/) override {
    return CpuAllocator::instance().take_peak();
  }

  std::int64_t capacity(c10::Device /*device*/) override { return read_host_memory().limit(); }

  std::uint64_t start_log(c10::Device /*device*/) override {
    return CpuAllocator::instance().log().start();
  }
  std::vector<AllocationEvent> end_log(std::uint64_t number) override {
    return CpuAllocator::instance().log().end(number);
  }

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
