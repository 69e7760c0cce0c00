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
#include "memory/cuda_allocator.h"
#include "memory/event_log.h"

namespace brim {
namespace {

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
    const std::lock_guard lock(mutex_);
    MemoryStats stats = without_budget(device);
    limit_by_budget(device, stats);
    stats.ooms += exact_ != nullptr ? exact_->refused(device.index()) : 0;
    return stats;
  }

  void set_limit(c10::Device device, std::optional<std::int64_t> bytes) override {
    const std::lock_guard lock(mutex_);
    const c10::DeviceIndex index = device.index();
    const double outer = outer_fraction(index);
    const MemoryStats now = AcceleratorBackend::stats(device);
    CudaAllocator::Limit limit{.fraction = outer, .outer_fraction = outer};
    std::int64_t reservable = limit.bytes;
    if (bytes) {
      limit.bytes = *bytes;
      // What such a budget had to reserve for pieces before is no reason to empty the cache again,
      // where each step opens one.
      const bool is_near = static_cast<double>(now.reserved) <=
                           (1 + CudaAllocator::kMostPieces) * static_cast<double>(*bytes);
      reservable = is_near ? std::max(*bytes, now.reserved) : *bytes;
      // A fraction that the user set with torch's own call stays in force below the budget.
      limit.fraction = std::min(fraction_for(std::min(reservable, now.limit), now.limit), outer);
      limits_[index] = limit;
    } else {
      limits_.erase(index);
    }
    exact_ = CudaAllocator::install(log_);
    if (exact_ != nullptr) {
      exact_->set_limit(index, limit);
    } else {
      caching::setMemoryFraction(limit.fraction, index);
    }
    // So that what is reserved goes below it.
    if (now.reserved > reservable) {
      release_cached(device);
    }
  }

  AllocationGates* gates() override {
    CudaAllocator* const allocator = CudaAllocator::install(log_);
    return allocator == nullptr ? nullptr : &allocator->gates();
  }

  LiveBlocks* live_blocks() override {
    CudaAllocator* const allocator = CudaAllocator::install(log_);
    return allocator == nullptr ? nullptr : &allocator->live_blocks();
  }

  std::int64_t retries(c10::Device device) override {
    return caching::getDeviceStats(device.index()).num_alloc_retries;
  }

  bool is_capturing() override { return CudaAllocator::is_capturing(); }

  EventLog* log() override {
    // torch cannot be told to stop calling, so this is done once, at the first use.
    static const bool attached = attach();
    return attached ? &log_ : nullptr;
  }

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
  /// Torch's memory fraction when no budget is open.
  double outer_fraction(c10::DeviceIndex index) {
    const auto limit = limits_.find(index);
    return limit != limits_.end() ? limit->second.outer_fraction
                                  : caching::getMemoryFraction(index);
  }

  MemoryStats without_budget(c10::Device device) {
    MemoryStats stats = AcceleratorBackend::stats(device);
    if (const double fraction = outer_fraction(device.index()); fraction < 1.0) {
      within(static_cast<std::int64_t>(fraction * static_cast<double>(stats.limit)), stats);
      stats.reservable = stats.allocated + stats.free;
    }
    return stats;
  }

  void limit_by_budget(c10::Device device, MemoryStats& stats) {
    if (const auto limit = limits_.find(device.index()); limit != limits_.end()) {
      within(limit->second.bytes, stats);
      if (exact_ == nullptr) {
        stats.reservable = stats.allocated + stats.free;
      }
    }
  }

  static void within(std::int64_t limit, MemoryStats& stats) {
    stats.limit = std::min(limit, stats.limit);
    stats.free = std::clamp<std::int64_t>(stats.limit - stats.allocated, 0,
                                          std::max<std::int64_t>(stats.free, 0));
  }

  bool attach() {
    try {
      caching::attachAllocatorTraceTracker([this](const auto& entry) { note(entry); });
      return true;
    } catch (const c10::Error&) {  // cudaMallocAsync
      return false;
    }
  }

  /// torch calls it under its own lock, so nothing here asks torch while it holds the log's.
  template <class Entry>
  void note(const Entry& entry) {
    const bool freed = entry.action_ == Entry::FREE_COMPLETED;
    const bool refused = entry.action_ == Entry::OOM && !CudaAllocator::is_serving();
    const bool wanted = freed ? log_.wants_frees() : log_.is_open();
    if (!wanted || (!freed && !refused && entry.action_ != Entry::ALLOC)) {
      return;
    }
    log_.note({.address = static_cast<std::uintptr_t>(entry.addr_),
               .bytes = static_cast<std::int64_t>(entry.size_),
               .stream = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(entry.stream_)),
               .freed = freed,
               .refused = refused},
              entry.device_);
  }

  EventLog log_;
  std::mutex mutex_;
  std::unordered_map<c10::DeviceIndex, CudaAllocator::Limit> limits_;  // of open budgets
  CudaAllocator* exact_ = nullptr;  // where it limits, and not torch's fraction alone
};

[[maybe_unused]] const bool kRegistered = [] {
  register_cuda_backend(*new CudaBackend);  // never destroyed, as every backend
  return true;
}();

}  // namespace
}  // namespace brim
