#pragma once

#include <brim/adapt/detail/random_state.h>
#include <brim/adapt/options.h>
#include <brim/export.h>
#include <brim/memory/host_limit.h>
#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <utility>

namespace brim {

/// Tells other threads, as long as it lives, that an adaptive call runs on this one: a thread that
/// runs out of memory waits for the others before giving up. Belongs to its thread.
class RunningCall {
 public:
  /// How many there have been on a thread. Only that thread writes, so that a call that fits pays
  /// for no lock and for no cache line that others write to.
  using Count = std::atomic<std::uint64_t>;

  RunningCall();
  ~RunningCall() {
    if (ended_ != nullptr) {
      increment(*ended_);
    }
  }
  RunningCall(RunningCall&& other) noexcept : ended_(std::exchange(other.ended_, nullptr)) {}
  RunningCall& operator=(RunningCall&& other) noexcept {
    std::swap(ended_, other.ended_);
    return *this;
  }

 private:
  /// Relaxed, since a release delays the next call by 8 ns on Arm. Who sees that a call has ended
  /// tries again microseconds later, when the memory that it gave back is seen too.
  static void increment(Count& count) {
    count.store(count.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }

  Count* ended_;  // of this thread
};

/// The state before an attempt: how much memory was in use, and the random state. Cheap, because it
/// is taken on the path of a call that fits.
class BRIM_API Checkpoint {
 public:
  /// Whether to read how much memory of an accelerator is in use. That takes microseconds, many
  /// times the rest. Without it a first failed attempt is not checked for memory that did not come
  /// back; the attempts after it are.
  enum class Detail : std::uint8_t { all, cheap };

  explicit Checkpoint(const AdaptOptions& options, Detail detail = Detail::all);

  /// The device that the options name, or the current one. The current one is looked up when it is
  /// needed, after a failure or for all details: the driver takes its time.
  c10::Device device() const;

  /// Bytes that tensors held on `device` at that time; empty for a device that was not read.
  std::optional<std::int64_t> held(c10::Device device) const;

  void restore_random_state() const;

 private:
  RunningCall running_;
  mutable std::optional<c10::Device> device_;
  HostLimit host_limit_;
  std::int64_t cpu_held_;
  std::optional<std::int64_t> device_held_;  // of an accelerator
  std::optional<RandomState> random_;
};

}  // namespace brim
