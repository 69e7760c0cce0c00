#include <brim/memory/block_watch.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <deque>
#include <mutex>
#include <unordered_map>

#include "fork.h"
#include "memory/backend.h"
#include "memory/live_blocks.h"

namespace brim {
namespace {

std::atomic<PlaceFinder> place_finder{nullptr};

/// Texts of places by number. They stay for the life of the process.
struct Places {
  std::mutex mutex;
  std::deque<std::string> texts;
  std::unordered_map<std::string_view, std::int32_t> numbers;  // of texts
};

std::int64_t worth_noting(std::int64_t capacity) {
  constexpr std::int64_t kLeast = std::int64_t{4} << 10;
  constexpr std::int64_t kMost = std::int64_t{1} << 20;
  constexpr std::int64_t kShares = std::int64_t{1} << 16;
  return std::clamp(capacity / kShares, kLeast, kMost);
}

}  // namespace

BlockWatch::BlockWatch(c10::Device device, std::int64_t least)
    : device_(resolve_device(device)), least_(least) {
  TORCH_CHECK_VALUE(least >= 0, "least must be a number of bytes or 0, got ", least);
  DeviceBackend& backend = backend_for(device_);
  backend.prepare(device_);
  const DeviceBackend::Room room = backend.headroom(device_);
  held_ = room.allocated;
  if (least_ == 0) {
    least_ = worth_noting(room.allocated + room.free);
  }
  live_ = backend.live_blocks();
  if (live_ != nullptr) {
    live_->open(least_);
  }
}

void BlockWatch::close() noexcept {
  if (live_ != nullptr) {
    live_->close();
    live_ = nullptr;
  }
}

std::vector<LiveBlock> BlockWatch::blocks() const {
  if (live_ == nullptr) {
    return {};
  }
  std::vector<LiveBlock> found = live_->blocks();
  // A caching allocator tells nobody at once what is freed; what it holds now decides.
  if (const auto segments = backend_for(device_).segments(device_)) {
    std::unordered_map<std::int64_t, std::int64_t> held;  // bytes by address
    for (const AllocatorSegment& segment : *segments) {
      for (const auto& block : segment.blocks) {
        if (block.allocated) {
          held.emplace(block.address, block.size);
        }
      }
    }
    std::erase_if(found, [&](const LiveBlock& block) {
      const auto now = held.find(static_cast<std::int64_t>(block.address));
      // Smaller than what was noted: another one has its address now.
      return now == held.end() || now->second < block.bytes;
    });
  }
  return found;
}

std::int64_t BlockWatch::clock() const { return live_ == nullptr ? 0 : live_->clock(); }

std::int32_t place_number(std::string_view text) {
  auto& places = shared_object<Places>();
  const std::lock_guard lock(places.mutex);
  if (const auto found = places.numbers.find(text); found != places.numbers.end()) {
    return found->second;
  }
  const auto number = static_cast<std::int32_t>(places.texts.size());
  places.numbers.emplace(places.texts.emplace_back(text), number);
  return number;
}

std::string place_text(std::int32_t place) {
  auto& places = shared_object<Places>();
  const std::lock_guard lock(places.mutex);
  const auto number = static_cast<std::size_t>(place);
  return place >= 0 && number < places.texts.size() ? places.texts[number] : std::string();
}

void set_place_finder(PlaceFinder finder) noexcept { place_finder.store(finder); }

std::int32_t current_place() noexcept {
  try {
    if (const auto node = torch::autograd::get_current_node()) {
      return place_number("backward of " + node->name());
    }
    const PlaceFinder finder = place_finder.load(std::memory_order_relaxed);
    return finder == nullptr ? -1 : finder();
  } catch (...) {
    return -1;  // no memory for the text
  }
}

}  // namespace brim
