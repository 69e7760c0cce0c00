#include "memory/live_blocks.h"

#include <algorithm>
#include <new>

namespace brim {

void LiveBlocks::open(std::int64_t least) {
  const std::lock_guard lock(mutex_);
  if (++watches_ == 1) {
    clock_.store(0, std::memory_order_relaxed);
    least_.store(static_cast<std::size_t>(least), std::memory_order_relaxed);
  }
}

void LiveBlocks::close() noexcept {
  const std::lock_guard lock(mutex_);
  if (--watches_ == 0) {
    least_.store(kClosed, std::memory_order_relaxed);
    blocks_.clear();
  }
}

void LiveBlocks::note(std::uintptr_t address, std::int64_t bytes) noexcept {
  const std::int32_t place = current_place();
  const std::lock_guard lock(mutex_);
  if (watches_ == 0) {
    return;
  }
  try {
    const std::int64_t now = clock_.fetch_add(bytes, std::memory_order_relaxed);
    blocks_[address] = {.address = address, .bytes = bytes, .made_at = now, .place = place};
  } catch (const std::bad_alloc&) {
    // One holder less is named.
  }
}

void LiveBlocks::forget(std::uintptr_t address) noexcept {
  const std::lock_guard lock(mutex_);
  blocks_.erase(address);
}

std::vector<LiveBlock> LiveBlocks::blocks() {
  std::vector<LiveBlock> found;
  {
    const std::lock_guard lock(mutex_);
    found.reserve(blocks_.size());
    for (const auto& [address, block] : blocks_) {
      found.push_back(block);
    }
  }
  std::sort(found.begin(), found.end(),
            [](const LiveBlock& a, const LiveBlock& b) { return a.made_at < b.made_at; });
  return found;
}

}  // namespace brim
