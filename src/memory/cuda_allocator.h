#pragma once

#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/version.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "memory/allocation_gates.h"
#include "memory/event_log.h"
#include "memory/live_blocks.h"
#include "memory/reclaim.h"

namespace brim {

namespace caching = c10::cuda::CUDACachingAllocator;

/// torch's CUDA allocator, with gates and limits, and asked again after a refusal if memory could
/// be reclaimed. Everything else is handed on as it is: one line for each of its members.
class CudaAllocator final : public caching::CUDAAllocator {
 public:
  using Index = c10::DeviceIndex;

  /// Puts it in front of torch's, also after CUDA was first used, unless another than torch's own
  /// is in the way (a pluggable one). @returns null then
  /// @param log where it notes what it refuses; lives for ever
  static CudaAllocator* install(EventLog& log);

  /// Whether this thread waits for it. What torch refuses meanwhile may be tried again.
  static bool is_serving();

  /// Whether a CUDA graph captures what this thread runs.
  static bool is_capturing();

  AllocationGates& gates() { return gates_; }
  LiveBlocks& live_blocks() { return live_; }

  static constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();
  /// Of a budget, beyond it: what may be reserved before the cache is emptied rather than widened.
  static constexpr double kMostPieces = 0.25;

  /// What a device's tensors may hold: exact, but for less than the 1 MiB that torch does not split
  /// from a block. What is reserved stays below it, too, where the cache is not in pieces.
  struct Limit {
    std::int64_t bytes = kUnlimited;
    double fraction = 1;        // torch's, of the bytes
    double outer_fraction = 1;  // without the limit
  };
  void set_limit(Index device, const Limit& limit);

  /// How often a limit has refused a request.
  std::int64_t refused(Index device);

  /// @throws c10::OutOfMemoryError if nothing is left to be reclaimed, or while a CUDA graph is
  /// captured, when nothing may be.
  c10::DataPtr allocate(std::size_t bytes) override;
  void* raw_alloc(std::size_t bytes) override;
  void* raw_alloc_with_stream(std::size_t bytes, cudaStream_t stream) override;

  // -- As torch's ------------------------------------------------------------------------------

  using Pool = c10::MempoolId_t;
  // Some of these are torch's names for types of c10.
  using Observer = caching::OutOfMemoryObserver;
  using Tracker = caching::AllocatorTraceTracker;
  using State = std::shared_ptr<caching::AllocatorState>;

  c10::DeleterFnPtr raw_deleter() const override { return next_.raw_deleter(); }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override {
    return next_.is_simple_data_ptr(data);
  }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    next_.copy_data(to, from, count);
  }
  bool initialized() override { return next_.initialized(); }
  void emptyCache(Pool pool) override { next_.emptyCache(pool); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    note_use_on_another_stream();
    next_.recordStream(data, stream);
  }
  void recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) override {
    note_use_on_another_stream();
    next_.recordStream(data, stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(Index device) override {
    return next_.getDeviceStats(device);
  }
  void resetAccumulatedStats(Index device) override { next_.resetAccumulatedStats(device); }
  void resetPeakStats(Index device) override { next_.resetPeakStats(device); }
  std::pair<std::size_t, std::size_t> getMemoryInfo(Index device) override {
    return next_.getMemoryInfo(device);
  }
  void raw_delete(void* block) override { next_.raw_delete(block); }
  void init(int devices) override { next_.init(devices); }
  double getMemoryFraction(Index device) override { return next_.getMemoryFraction(device); }
  void setMemoryFraction(double fraction, Index device) override {
    next_.setMemoryFraction(fraction, device);
  }
  std::vector<caching::StreamSegmentSize> getExpandableSegmentSizes(Index device) override {
    return next_.getExpandableSegmentSizes(device);
  }
  void enable(bool value) override { next_.enable(value); }
  bool isEnabled() const override { return next_.isEnabled(); }
  void cacheInfo(Index device, std::size_t* largest) override { next_.cacheInfo(device, largest); }
  void* getBaseAllocation(void* block, std::size_t* size) override {
    return next_.getBaseAllocation(block, size);
  }
  caching::SnapshotInfo snapshot(Pool pool, bool traces) override {
    return next_.snapshot(pool, traces);
  }
  void beginAllocateToPool(Index device, Pool pool,
                           std::function<bool(cudaStream_t)> filter) override {
    next_.beginAllocateToPool(device, pool, std::move(filter));
  }
  void endAllocateToPool(Index device, Pool pool) override {
    next_.endAllocateToPool(device, pool);
  }
  void releasePool(Index device, Pool pool) override { next_.releasePool(device, pool); }
  int getPoolUseCount(Index device, Pool pool) override {
    return next_.getPoolUseCount(device, pool);
  }
  void createOrIncrefPool(Index device, Pool pool,
                          std::shared_ptr<CUDAAllocator> allocator) override {
    next_.createOrIncrefPool(device, pool, std::move(allocator));
  }
  void setUseOnOOM(Index device, Pool pool, bool use) override {
    next_.setUseOnOOM(device, pool, use);
  }
  void setNoSplit(Index device, Pool pool) override { next_.setNoSplit(device, pool); }
  bool checkPoolLiveAllocations(Index device, Pool pool,
                                const std::unordered_set<void*>& expected) override {
    return next_.checkPoolLiveAllocations(device, pool, expected);
  }
  caching::ShareableHandle shareIpcHandle(void* block) override {
    return next_.shareIpcHandle(block);
  }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    return next_.getIpcDevPtr(std::move(handle));
  }
  bool isHistoryEnabled() override { return next_.isHistoryEnabled(); }
  void recordHistory(bool enabled, caching::CreateContextFn recorder, std::size_t most,
                     caching::RecordContext when, bool clear,
                     const std::vector<std::string>& skip) override {
    next_.recordHistory(enabled, recorder, most, when, clear, skip);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& notes) override {
    next_.recordAnnotation(notes);
  }
  void pushCompileContext(std::string& context) override { next_.pushCompileContext(context); }
  void popCompileContext() override { next_.popCompileContext(); }
  void setUserMetadata(const std::string& metadata) override { next_.setUserMetadata(metadata); }
  std::string getUserMetadata() override { return next_.getUserMetadata(); }
  void attachOutOfMemoryObserver(Observer observer) override {
    next_.attachOutOfMemoryObserver(std::move(observer));
  }
  void attachAllocatorTraceTracker(Tracker tracker) override {
    next_.attachAllocatorTraceTracker(std::move(tracker));
  }
  void enablePeerAccess(Index device, Index other) override {
    next_.enablePeerAccess(device, other);
  }
  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device,
                          std::size_t count, cudaStream_t stream, bool peers) override {
    return next_.memcpyAsync(to, to_device, from, from_device, count, stream, peers);
  }
  State getCheckpointState(Index device, Pool pool) override {
    return next_.getCheckpointState(device, pool);
  }
  caching::CheckpointDelta setCheckpointPoolState(Index device, State state) override {
    return next_.setCheckpointPoolState(device, std::move(state));
  }
  std::string name() override { return next_.name(); }
#if TORCH_VERSION_MINOR >= 12
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* block) override {
    return next_.getContextForPointer(block);
  }
  void attachOomRejectionObserver(caching::OomRejectionObserver observer) override {
    next_.attachOomRejectionObserver(std::move(observer));
  }
#endif
#if TORCH_VERSION_MINOR >= 13
  void markCaptureBegin(Index device) override { next_.markCaptureBegin(device); }
  void markCaptureEnd(Index device) override { next_.markCaptureEnd(device); }
  c10::DataPtr allocateWithAddress(std::size_t size, void* address) override {
    return next_.allocateWithAddress(size, address);
  }
#endif
#if TORCH_VERSION_MINOR >= 14
  bool supportsUserMetadata() override { return next_.supportsUserMetadata(); }
  void annotateMemory(const void* block, const std::string& metadata) override {
    next_.annotateMemory(block, metadata);
  }
#endif

 private:
  class Admitted;

  struct Limited {
    std::atomic<bool> is_limited{false};
    Limit limit;
    std::int64_t admitted = 0;  // bytes of requests that torch serves now
    std::int64_t refused = 0;
    std::int64_t retries = 0;  // of torch, at the last request
  };

  CudaAllocator(CUDAAllocator& next, EventLog& log) : next_(next), log_(log) {}

  Limited& limited(Index device) { return limited_.at(static_cast<std::size_t>(device)); }
  std::int64_t allocated(Index device);
  void note_refusal(Index device);
  void widen_if_retried(Index device, std::int64_t retries);

  template <class Allocate>
  auto allocate_beyond(Index device, const Allocate& allocate);
  template <class Allocate>
  auto allocate_or_reclaim(std::size_t bytes, const Allocate& allocate);
  template <class Block>
  Block noted(Block block, std::size_t bytes);

  CUDAAllocator& next_;
  EventLog& log_;
  AllocationGates gates_;
  LiveBlocks live_;
  std::mutex mutex_;  // of what is limited
  std::array<Limited, C10_COMPILE_TIME_MAX_GPUS> limited_;
};

}  // namespace brim
