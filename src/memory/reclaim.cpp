#include "memory/reclaim.h"

#include <atomic>

namespace brim {
namespace {

constinit std::atomic<Reclaim> in_force{nullptr};

}  // namespace

void set_reclaim(Reclaim reclaim) { in_force.store(reclaim); }

bool reclaimed(c10::Device device, std::int64_t bytes) noexcept {
  const Reclaim reclaim = in_force.load(std::memory_order_acquire);
  return reclaim != nullptr && reclaim(device, bytes) > 0;
}

}  // namespace brim
