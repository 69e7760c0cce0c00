#pragma once

#include <brim/export.h>
#include <c10/core/Allocator.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "memory/allocation_gates.h"
#include "memory/event_log.h"
#include "memory/live_blocks.h"

namespace brim {

/// The most and the least bytes held since the last reset, and the bytes held now.
struct PeakReading {
  std::int64_t peak = 0;
  std::int64_t current = 0;
  std::int64_t low = 0;  ///< `current` where the allocator does not keep it
};

/// torch's CPU allocator with a count of every byte, a limit, and gates.
///
/// Each block is preceded by one cache line that holds its size, so that a block can be freed on
/// any thread and after the limit changed, and the count stays exact. Only the bytes that were
/// asked for are counted, not that line.
///
/// A forked process counts what it allocates itself, from zero: what it inherits it shares with its
/// parent. The limit stays.
///
/// One instance for the process, never destroyed: tensors may outlive everything else. All members
/// are thread-safe.
class CpuAllocator final : public c10::Allocator {
 public:
  static constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();

  static CpuAllocator& instance();

  /// Makes this torch's CPU allocator from now on. Tensors that exist already stay with the old
  /// one, uncounted.
  void install();
  static bool installed() { return in_use.load(std::memory_order_relaxed); }

  /// Installs it unless something is in the way, which it asks once. Whether it is installed.
  static bool try_install() noexcept { return installed() || install_if_possible(); }

  /// @throws c10::OutOfMemoryError over the limit, at a gate's refusal, or when the system has no
  /// more.
  c10::DataPtr allocate(std::size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* dest, const void* src, std::size_t count) const override;

  static std::int64_t allocated() { return bytes_held.load(std::memory_order_relaxed); }
  /// The number of allocations since the process began.
  static std::int64_t allocations() { return blocks_made.load(std::memory_order_relaxed); }
  /// An allocation in progress on another thread is in the count a moment before it is in the peak.
  PeakReading peak() const {
    const std::int64_t now = allocated();
    return {std::max(peak_.load(std::memory_order_relaxed), now), now,
            std::min(least_held.load(std::memory_order_relaxed), now)};
  }

  /// Reads the peak and starts a new one at the bytes held now. No peak is lost to a concurrent
  /// allocation: it is either in the sample or in the peak that follows.
  PeakReading take_peak();

  std::int64_t limit() const { return limit_.load(std::memory_order_relaxed); }
  void set_limit(std::int64_t bytes) { limit_.store(bytes, std::memory_order_relaxed); }

  /// Of what is allocated, refused and freed, while it is open.
  EventLog& log() { return log_; }

  AllocationGates& gates() { return gates_; }
  LiveBlocks& live_blocks() { return live_; }

 private:
  CpuAllocator();

  static bool install_if_possible() noexcept;
  static void free_block(void* data);
  static void in_forked_child();
  void reserve(std::int64_t bytes);
  static void release(std::int64_t bytes) {
    lower_low(bytes_held.fetch_sub(bytes, std::memory_order_relaxed) - bytes);
  }
  void raise_peak(std::int64_t candidate);
  static void lower_low(std::int64_t candidate);

  // Static, and read without ordering: each adaptive call or each freed block asks for them.
  static inline constinit std::atomic<bool> in_use{false};
  static inline constinit std::atomic<std::int64_t> bytes_held{0};
  static inline constinit std::atomic<std::int64_t> blocks_made{0};
  static inline constinit std::atomic<std::int64_t> least_held{0};
  static inline constinit CpuAllocator* made = nullptr;      // at the latest by its first block
  static inline constinit c10::Allocator* before = nullptr;  // whose place it took
  static inline constinit std::size_t process{0};  // tells its blocks from those that it inherited

  std::atomic<std::int64_t> peak_{0};
  std::atomic<std::int64_t> limit_{kUnlimited};

  AllocationGates gates_;
  EventLog log_;
  LiveBlocks live_;
};

}  // namespace brim
