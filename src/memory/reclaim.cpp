#include "memory/reclaim.h"

#include <atomic>

namespace brim {
namespace {

constinit std::atomic<Reclaim> in_force{nullptr};
constinit std::atomic<GivenUp> telling{nullptr};

}  // namespace

void set_reclaim(Reclaim reclaim, GivenUp given_up) {
  telling.store(given_up);
  in_force.store(reclaim);
}

std::string given_up(c10::Device device) {
  const GivenUp tell = telling.load(std::memory_order_acquire);
  return tell == nullptr ? std::string() : tell(device);
}

bool reclaimed(c10::Device device, std::int64_t bytes) noexcept {
  const Reclaim reclaim = in_force.load(std::memory_order_acquire);
  return reclaim != nullptr && reclaim(device, bytes) > 0;
}

}  // namespace brim
