#include "memory/cuda_allocator.h"

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>

#include "memory/oom_message.h"
#include "memory/reclaim.h"

namespace brim {
namespace {

thread_local bool serves = false;

/// This thread waits for an allocation, which may be tried again.
class Serving {
 public:
  Serving() { serves = true; }
  Serving(const Serving&) = delete;
  Serving& operator=(const Serving&) = delete;
  ~Serving() { serves = before_; }

 private:
  bool before_ = serves;
};

/// In blocks of torch's allocator.
std::int64_t rounded(std::size_t bytes) {
  constexpr std::int64_t kBlock = 512;
  return (static_cast<std::int64_t>(bytes) + kBlock - 1) / kBlock * kBlock;
}

}  // namespace

/// A request that the budget allows. It counts as allocated until torch counts it.
class CudaAllocator::Admitted {
 public:
  Admitted(CudaAllocator& allocator, Index device, std::size_t bytes)
      : allocator_(allocator), limited_(allocator.limited(device)), bytes_(rounded(bytes)) {
    // Nothing is always allowed: a budget may be below what is held.
    if (bytes == 0 || !limited_.is_limited.load(std::memory_order_relaxed)) {
      bytes_ = 0;
      return;
    }
    // Requests of other threads count twice for a moment. They are not waited for without end: they
    // may wait for what this thread holds, such as the GIL.
    constexpr int kMostTries = 1000;
    for (int tries = 1; !is_admitted(device, tries == kMostTries); ++tries) {
      std::this_thread::yield();
    }
  }
  Admitted(const Admitted&) = delete;
  Admitted& operator=(const Admitted&) = delete;
  ~Admitted() {
    if (bytes_ != 0 && missing_ == 0) {
      const std::lock_guard lock(allocator_.mutex_);
      limited_.admitted -= bytes_;
    }
  }

  /// Of the bytes; 0 if it was admitted.
  [[nodiscard]] std::int64_t missing() const { return missing_; }
  /// When it was not.
  [[nodiscard]] std::int64_t held() const { return held_; }
  [[nodiscard]] std::int64_t allowed() const { return allowed_; }

 private:
  /// Whether it is known.
  bool is_admitted(Index device, bool is_last_try) {
    const std::lock_guard lock(allocator_.mutex_);
    const auto stats = allocator_.next_.getDeviceStats(device);
    held_ = stats.allocated_bytes[0].current;
    allowed_ = limited_.limit.bytes;
    allocator_.widen_if_retried(device, stats.num_alloc_retries);
    const std::int64_t room = allowed_ - held_ - limited_.admitted;
    if (bytes_ <= room) {
      limited_.admitted += bytes_;
      missing_ = 0;
      return true;
    }
    missing_ = bytes_ - room;
    return limited_.admitted == 0 || is_last_try;
  }

  CudaAllocator& allocator_;
  Limited& limited_;
  std::int64_t bytes_;
  std::int64_t missing_ = 0;
  std::int64_t held_ = 0;
  std::int64_t allowed_ = 0;
};

bool CudaAllocator::is_capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

bool CudaAllocator::is_serving() { return serves; }

CudaAllocator* CudaAllocator::install(EventLog& log) {
  static CudaAllocator* const installed = [&]() -> CudaAllocator* {
    caching::CUDAAllocator* const torchs = caching::get();
    if (torchs->name() != "native" && torchs->name() != "cudaMallocAsync") {
      return nullptr;
    }
    // Never destroyed: blocks may outlive all else.
    auto* const made = new CudaAllocator(*torchs, log);
    caching::allocator.store(made);
    return made;
  }();
  return installed;
}

std::int64_t CudaAllocator::allocated(Index device) {
  return next_.getDeviceStats(device).allocated_bytes[0].current;
}

void CudaAllocator::set_limit(Index device, const Limit& limit) {
  const std::lock_guard lock(mutex_);
  Limited& limited = this->limited(device);
  limited.limit = limit;
  limited.retries = next_.getDeviceStats(device).num_alloc_retries;
  limited.is_limited.store(limit.bytes != kUnlimited);
  next_.setMemoryFraction(limit.fraction, device);
}

std::int64_t CudaAllocator::refused(Index device) {
  const std::lock_guard lock(mutex_);
  return limited(device).refused;
}

/// Torch has given back what it had cached to serve a request that the budget allowed, so its cache
/// is in pieces. That takes milliseconds, and the next step would be no better: it may reserve a
/// little more instead, up to `kMostPieces` of the budget.
void CudaAllocator::widen_if_retried(Index device, std::int64_t retries) {
  Limited& limited = this->limited(device);
  if (retries == limited.retries) {
    return;
  }
  limited.retries = retries;
  constexpr double kStep = 1.0 / 8;
  Limit& limit = limited.limit;
  const auto budget =
      static_cast<double>(limit.bytes) / static_cast<double>(next_.getMemoryInfo(device).second);
  const double most = std::min((1 + kMostPieces) * budget, limit.outer_fraction);
  limit.fraction = std::max(limit.fraction, std::min(limit.fraction + kStep * budget, most));
  next_.setMemoryFraction(limit.fraction, device);
}

/// The budget allows the bytes, and torch refuses: what it has cached is in pieces. Then it may
/// reserve more than the budget, and need not give back all that it has cached for it again.
template <class Allocate>
auto CudaAllocator::allocate_beyond(Index device, const Allocate& allocate) {
  Limit& limit = limited(device).limit;
  const auto set_fraction = [&](bool is_outer) {
    const std::lock_guard lock(mutex_);
    if (!is_outer) {
      const auto reserved = next_.getDeviceStats(device).reserved_bytes[0].current;
      const std::size_t total = next_.getMemoryInfo(device).second;
      limit.fraction = std::clamp(static_cast<double>(reserved) / static_cast<double>(total),
                                  limit.fraction, limit.outer_fraction);
    }
    next_.setMemoryFraction(is_outer ? limit.outer_fraction : limit.fraction, device);
  };
  set_fraction(true);
  try {
    auto block = allocate();
    set_fraction(false);
    return block;
  } catch (...) {
    set_fraction(false);
    throw;
  }
}

template <class Allocate>
auto CudaAllocator::allocate_or_reclaim(std::size_t bytes, const Allocate& allocate) {
  const Serving serving;
  const Index index = c10::cuda::current_device();
  const c10::Device device(c10::DeviceType::CUDA, index);
  const auto size = static_cast<std::int64_t>(bytes);
  const auto is_reclaimed = [&](std::int64_t missing) {
    const bool done = !is_capturing() && reclaimed(device, missing);
    if (!done && log_.is_open()) {
      log_.note({.bytes = size, .refused = true}, index);
    }
    return done;
  };
  while (true) {
    if (bytes != 0 && !gates_.admit(bytes)) {
      if (!is_reclaimed(size)) {
        throw_refusal(device, size, allocated(index),
                      ": this failure was injected by brim::testing::OomInjector");
      }
      continue;
    }
    const Admitted admitted(*this, index, bytes);
    if (admitted.missing() != 0) {
      if (!is_reclaimed(admitted.missing())) {
        note_refusal(index);
        throw_refusal(device, size, admitted.held(),
                      allowed_by_budget(admitted.allowed(), admitted.held()));
      }
      continue;
    }
    try {
      try {
        return allocate();
      } catch (const c10::OutOfMemoryError&) {
        if (is_capturing() || !limited(index).is_limited.load()) {
          throw;
        }
      }
      return allocate_beyond(index, allocate);
    } catch (c10::OutOfMemoryError& error) {
      if (!is_reclaimed(size)) {
        if (std::string told = given_up(device); !told.empty()) {
          error.add_context(std::move(told));
        }
        throw;
      }
    }
  }
}

void CudaAllocator::note_refusal(Index device) {
  const std::lock_guard lock(mutex_);
  ++limited(device).refused;
}

/// Here torch's allocator is not locked, so that finding the place may wait for the GIL. That a
/// block is freed is not noted: BlockWatch asks which ones are held.
template <class Block>
Block CudaAllocator::noted(Block block, std::size_t bytes) {
  if (live_.wants(bytes)) [[unlikely]] {
    const void* address = nullptr;
    if constexpr (std::is_pointer_v<Block>) {
      address = block;
    } else {
      address = block.get();
    }
    live_.note(reinterpret_cast<std::uintptr_t>(address), static_cast<std::int64_t>(bytes));
  }
  return block;
}

c10::DataPtr CudaAllocator::allocate(std::size_t bytes) {
  return noted(allocate_or_reclaim(bytes, [&] { return next_.allocate(bytes); }), bytes);
}

void* CudaAllocator::raw_alloc(std::size_t bytes) {
  return noted(allocate_or_reclaim(bytes, [&] { return next_.raw_alloc(bytes); }), bytes);
}

void* CudaAllocator::raw_alloc_with_stream(std::size_t bytes, cudaStream_t stream) {
  const auto allocate = [&] { return next_.raw_alloc_with_stream(bytes, stream); };
  return noted(allocate_or_reclaim(bytes, allocate), bytes);
}

}  // namespace brim
