#pragma once

#include <brim/export.h>
#include <brim/memory/block_watch.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace brim {

/// The blocks that one allocator has given out while a BlockWatch is open, if they are large enough
/// to matter, and are still in use. Thread-safe.
class BRIM_API LiveBlocks {
 public:
  /// @param least the bytes from which on blocks are noted. Watches nest: those of the outermost.
  void open(std::int64_t least);
  /// What was noted goes with the last watch.
  void close() noexcept;

  /// Without the lock: asked on every allocation.
  [[nodiscard]] bool wants(std::size_t bytes) const {
    return bytes >= least_.load(std::memory_order_relaxed);
  }

  /// To be called without locks: it may wait for the GIL, to find the place. Does not throw: memory
  /// may have just run out.
  void note(std::uintptr_t address, std::int64_t bytes) noexcept;
  void forget(std::uintptr_t address) noexcept;

  [[nodiscard]] std::vector<LiveBlock> blocks();
  /// Bytes noted so far, in all: the clock of LiveBlock::made_at.
  [[nodiscard]] std::int64_t clock() const { return clock_.load(std::memory_order_relaxed); }

  /// To be held while the process forks, so that the child finds it unlocked.
  [[nodiscard]] std::mutex& mutex() { return mutex_; }
  /// In the child, before that is released: what it has inherited is its parent's.
  void forget_all() { blocks_.clear(); }

 private:
  static constexpr std::size_t kClosed = std::numeric_limits<std::size_t>::max();

  std::atomic<std::size_t> least_{kClosed};
  std::atomic<std::int64_t> clock_{0};
  std::mutex mutex_;
  int watches_ = 0;
  std::unordered_map<std::uintptr_t, LiveBlock> blocks_;
};

/// The place where this thread is now; -1 if it is not known.
std::int32_t current_place() noexcept;

}  // namespace brim
