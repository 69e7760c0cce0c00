#include "memory/cpu_allocator.h"

#include <brim/memory/budget.h>
#include <brim/memory/cpu.h>
#include <brim/runtime.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "fork.h"
#include "memory/host_room.h"
#include "memory/oom_message.h"
#include "memory/reclaim.h"

namespace brim {
namespace {

// One cache line keeps torch's promise of 64-byte alignment for the data behind it.
constexpr std::size_t kHeaderBytes = 64;

// Blocks of this size are mapped by the C library and returned to the system when they are freed.
// torch's own way is the same except on ARM, where mimalloc keeps them: the machine then seems
// full, and nothing larger can be allocated.
constexpr std::size_t kReturnedBytes = std::size_t{32} << 20;

bool is_returned(std::size_t bytes) {
  if (bytes < kReturnedBytes) [[likely]] {
    return false;
  }
  static const bool asks_for_huge_pages = std::getenv("THP_MEM_ALLOC_ENABLE") != nullptr;
  return !asks_for_huge_pages;  // which torch's own way takes care of
}

void* allocate_block(std::size_t bytes) {
  if (!is_returned(bytes)) {
    return c10::alloc_cpu(bytes + kHeaderBytes);
  }
  void* block = nullptr;
  TORCH_CHECK(posix_memalign(&block, kHeaderBytes, bytes + kHeaderBytes) == 0,
              "posix_memalign: can't allocate memory");
  return block;
}

void free_block_of(std::size_t bytes, void* block) {
  is_returned(bytes) ? std::free(block) : c10::free_cpu(block);
}

struct Header {
  std::size_t bytes;
  std::size_t process;
  const void* data;  // behind it: so it is a header
  bool noted;        // in a log, which also records its end
  bool watched;      // among the live blocks
};

void report_to_profiler(void* data, std::int64_t change, std::int64_t allocated) {
  if (c10::memoryProfilingEnabled()) {
    c10::reportMemoryUsageToProfiler(data, change,
                                     static_cast<std::size_t>(std::max<std::int64_t>(allocated, 0)),
                                     0, c10::Device(c10::DeviceType::CPU));
  }
}

/// Returns where another try is worth it: memory was given up for this one.
/// @param missing of the bytes
void refuse(std::int64_t bytes, std::int64_t missing, std::int64_t in_use, const std::string& why) {
  if (reclaimed(c10::DeviceType::CPU, missing)) {
    return;
  }
  if (EventLog& log = CpuAllocator::instance().log(); log.is_open()) {
    log.note({.bytes = bytes, .refused = true});
  }
  c10::reportOutOfMemoryToProfiler(bytes,
                                   static_cast<std::size_t>(std::max<std::int64_t>(in_use, 0)), 0,
                                   c10::Device(c10::DeviceType::CPU));
  throw_refusal(c10::DeviceType::CPU, bytes, in_use, why);
}

}  // namespace

CpuAllocator::CpuAllocator() {
  hold_during_fork(gates_.mutex(), &CpuAllocator::in_forked_child);
  hold_during_fork(log_.mutex(), [] { instance().log_.close_in_child(); });
  hold_during_fork(live_.mutex(), [] { instance().live_.forget_all(); });
}

void CpuAllocator::in_forked_child() {
  CpuAllocator& self = instance();
  ++process;
  bytes_held.store(0);
  self.peak_.store(0);
  least_held.store(0);
  HostLimit::begin_attempt();  // what this thread knew was about the parent
}

CpuAllocator& CpuAllocator::instance() {
  static const bool once = (made = new CpuAllocator) != nullptr;  // never destroyed
  (void)once;
  return *made;
}

void CpuAllocator::install() {
  check_only_copy();
  // Priority 0 as torch's own: a higher one could never be replaced again by the user.
  static const bool once = [this] {
    before = c10::GetCPUAllocator();
    c10::SetCPUAllocator(this, 0);
    in_use.store(true);
    return true;
  }();
  (void)once;
  TORCH_CHECK(c10::GetCPUAllocator() == this,
              "CPU memory cannot be counted or limited: another CPU allocator is installed, which "
              "torch gives a higher priority or which was set after brim's");
}

bool CpuAllocator::install_if_possible() noexcept {
  static const bool possible = [] {
    try {
      instance().install();
      return true;
    } catch (const c10::Error&) {
      return false;  // another allocator is installed
    }
  }();
  return possible;
}

c10::DataPtr CpuAllocator::allocate(std::size_t bytes) {
  const c10::Device cpu(c10::DeviceType::CPU);
  if (bytes == 0) {
    return {nullptr, nullptr, &CpuAllocator::free_block, cpu};
  }
  const auto size = static_cast<std::int64_t>(bytes);
  TORCH_CHECK_WITH(OutOfMemoryError, bytes < static_cast<std::size_t>(kUnlimited) - kHeaderBytes,
                   "CPU out of memory. Tried to allocate ", bytes,
                   " bytes, more than any machine has");
  while (!gates_.admit(bytes)) {
    refuse(size, size, allocated(), ": this failure was injected by brim::testing::OomInjector");
  }
  for (std::int64_t most = 0; (most = refused_by_host(size, allocated())) < limit();) {
    refuse(size, size, allocated(),
           " of " + with_exact(most) +
               " that the machine and its cgroups have for tensors (an adaptive call's "
               "host_limit)");
  }
  void* block = nullptr;
  while (block == nullptr) {
    reserve(size);
    try {
      block = allocate_block(bytes);
    } catch (const c10::Error& error) {  // out of memory: it is tried again, or refused
      release(size);
      refuse(size, size, allocated(),
             std::string(": the system has no more (") + error.what_without_backtrace() + ")");
    }
  }
  blocks_made.fetch_add(1, std::memory_order_relaxed);
  void* data = static_cast<char*>(block) + kHeaderBytes;
  const Header header{bytes, process, data, log_.is_open(), live_.wants(bytes)};
  std::memcpy(block, &header, sizeof(header));
  if (header.watched) [[unlikely]] {
    live_.note(reinterpret_cast<std::uintptr_t>(data), size);
  }
  if (header.noted) {
    log_.note({.address = reinterpret_cast<std::uintptr_t>(data), .bytes = size});
  }
  report_to_profiler(data, size, allocated());
  return {data, data, &CpuAllocator::free_block, cpu};
}

void CpuAllocator::reserve(std::int64_t bytes) {
  // Compare and swap, not add and take back: an allocation that fails must never make a concurrent
  // one fail too.
  std::int64_t held = bytes_held.load(std::memory_order_relaxed);
  do {
    for (std::int64_t allowed = 0; bytes > (allowed = limit()) - held;) {
      if (BeyondBudget::is_open()) {
        break;
      }
      refuse(bytes, bytes - (allowed - held), held, allowed_by_budget(allowed, held));
      held = bytes_held.load(std::memory_order_relaxed);
    }
  } while (!bytes_held.compare_exchange_weak(held, held + bytes, std::memory_order_relaxed));
  raise_peak(held + bytes);
}

void CpuAllocator::raise_peak(std::int64_t candidate) {
  std::int64_t peak = peak_.load(std::memory_order_relaxed);
  while (candidate > peak &&
         !peak_.compare_exchange_weak(peak, candidate, std::memory_order_relaxed)) {
  }
}

void CpuAllocator::lower_low(std::int64_t candidate) {
  std::int64_t low = least_held.load(std::memory_order_relaxed);
  while (candidate < low &&
         !least_held.compare_exchange_weak(low, candidate, std::memory_order_relaxed)) {
  }
}

PeakReading CpuAllocator::take_peak() {
  const std::int64_t now = allocated();
  const std::int64_t peak = peak_.exchange(now, std::memory_order_relaxed);
  const std::int64_t low = least_held.exchange(now, std::memory_order_relaxed);
  // An allocation between the lines above has its peak in `peak`; if it is still held, it counts
  // from here too. Likewise what was freed.
  raise_peak(allocated());
  lower_low(allocated());
  return {std::max(peak, now), now, std::min(low, now)};
}

void CpuAllocator::free_block(void* data) {
  if (data == nullptr) {
    return;
  }
  void* block = static_cast<char*>(data) - kHeaderBytes;
  Header header{};
  std::memcpy(&header, block, sizeof(header));
  if (header.data != data) {
    // oneDNN frees by the allocator of that moment also what it had from the one before.
    before->raw_deallocate(data);
    return;
  }
  if (header.process == process) {
    const auto size = static_cast<std::int64_t>(header.bytes);
    if (EventLog& log = made->log_; header.noted || log.is_open()) {
      log.note({.address = reinterpret_cast<std::uintptr_t>(data), .bytes = size, .freed = true});
    }
    if (header.watched) [[unlikely]] {
      made->live_.forget(reinterpret_cast<std::uintptr_t>(data));
    }
    release(size);
    report_to_profiler(data, -size, allocated());
  }
  free_block_of(header.bytes, block);
}

c10::DeleterFnPtr CpuAllocator::raw_deleter() const { return &CpuAllocator::free_block; }

void CpuAllocator::copy_data(void* dest, const void* src, std::size_t count) const {
  default_copy_data(dest, src, count);
}

void install_cpu_allocator() { CpuAllocator::instance().install(); }

bool cpu_allocator_installed() { return CpuAllocator::instance().installed(); }

}  // namespace brim
