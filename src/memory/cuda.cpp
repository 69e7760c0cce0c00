// Built into libbrim_cuda, the only part of the memory module that needs CUDA's headers.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "memory/backend.h"
#include "memory/cuda_log.h"

namespace brim {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

/// The fraction for which torch's `static_cast<size_t>(fraction * total)` is exactly `bytes`: a
/// plain quotient can land one byte below.
double fraction_for(std::int64_t bytes, std::int64_t total) {
  double fraction = static_cast<double>(bytes) / static_cast<double>(total);
  while (static_cast<std::int64_t>(fraction * static_cast<double>(total)) < bytes) {
    fraction = std::nextafter(fraction, 2.0);
  }
  return std::min(fraction, 1.0);
}

/// What belongs to a pool of its own (CUDA graphs), or is still in use on another stream, cannot be
/// had: it counts as allocated.
template <class Info>
AllocatorSegment segment_of(const Info& info) {
  const bool is_shared = info.owner_private_pool_id == decltype(info.owner_private_pool_id){};
  AllocatorSegment segment{
      .address = static_cast<std::int64_t>(info.address),
      .size = static_cast<std::int64_t>(info.total_size),
      .stream = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(info.stream)),
      .small = !info.is_large,
      .blocks = {}};
  std::int64_t address = segment.address;
  for (const auto& block : info.blocks) {
    const auto size = static_cast<std::int64_t>(block.size);
    segment.blocks.push_back({.address = address,
                              .size = size,
                              .requested = static_cast<std::int64_t>(block.requested_size),
                              .allocated = block.allocated || block.active || !is_shared});
    address += size;
  }
  return segment;
}

class CudaBackend final : public AcceleratorBackend {
 public:
  MemoryStats stats(c10::Device device) override {
    MemoryStats stats = AcceleratorBackend::stats(device);
    const double fraction = caching::getMemoryFraction(device.index());
    if (fraction < 1.0) {
      stats.limit = static_cast<std::int64_t>(fraction * static_cast<double>(stats.limit));
      stats.free = std::clamp<std::int64_t>(stats.limit - stats.allocated, 0,
                                            std::max<std::int64_t>(stats.free, 0));
    }
    return stats;
  }

  void set_limit(c10::Device device, std::optional<std::int64_t> bytes) override {
    const std::lock_guard lock(mutex_);
    const auto outer = outer_fraction_.find(device.index());
    if (!bytes) {
      if (outer != outer_fraction_.end()) {
        caching::setMemoryFraction(outer->second, device.index());
        outer_fraction_.erase(outer);
      }
      return;
    }
    if (outer == outer_fraction_.end()) {
      outer_fraction_[device.index()] = caching::getMemoryFraction(device.index());
    }
    const std::int64_t total = capacity(device);
    // A fraction that the user set with torch's own call stays in force below the budget.
    const double fraction = fraction_for(std::min(*bytes, total), total);
    caching::setMemoryFraction(std::min(fraction, outer_fraction_[device.index()]), device.index());
    // torch does not check the limit for blocks that are in its cache.
    if (AcceleratorBackend::stats(device).reserved > *bytes) {
      release_cached(device);
    }
  }

  std::uint64_t start_log(c10::Device device) override { return log_.start(device.index()); }
  std::vector<AllocationEvent> end_log(std::uint64_t number) override { return log_.end(number); }

  std::optional<std::vector<AllocatorSegment>> segments(c10::Device device) override {
    std::vector<AllocatorSegment> result;
    // Without the history that a user may record: copying it takes most of a second.
    for (const auto& segment : caching::snapshot({0, 0}, false).segments) {
      if (segment.device == device.index()) {
        result.push_back(segment_of(segment));
      }
    }
    return result;
  }

 private:
  CudaLog log_;
  std::mutex mutex_;
  std::unordered_map<c10::DeviceIndex, double> outer_fraction_;  // in force before our first limit
};

[[maybe_unused]] const bool kRegistered = [] {
  register_cuda_backend(*new CudaBackend);  // never destroyed, as every backend
  return true;
}();

}  // namespace
}  // namespace brim
