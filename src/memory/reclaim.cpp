#include "memory/reclaim.h"

#include <atomic>

namespace brim {
namespace {

constinit std::atomic<Reclaim> in_force{nullptr};
constinit std::atomic<GivenUp> telling{nullptr};
constinit std::atomic<std::int64_t> so_far{0};
constinit std::atomic<bool> other_streams{false};

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
  const std::int64_t freed = reclaim == nullptr ? 0 : reclaim(device, bytes);
  so_far.fetch_add(freed, std::memory_order_relaxed);
  return freed > 0;
}

void count_foreseen(std::int64_t bytes) noexcept {
  so_far.fetch_add(bytes, std::memory_order_relaxed);
}

std::int64_t bytes_given_up() noexcept { return so_far.load(std::memory_order_relaxed); }

void note_use_on_another_stream() noexcept { other_streams.store(true); }

bool is_used_on_other_streams() noexcept { return other_streams.load(); }

}  // namespace brim
