#pragma once

#include <brim/adapt/detail/random_state.h>
#include <brim/adapt/options.h>
#include <brim/export.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <utility>

namespace brim {

struct ThreadCalls;

/// Tells the other threads that an adaptive call runs on this one, as long as it lives: who finds
/// no memory waits for them before giving up. Belongs to its thread.
class BRIM_API RunningCall {
 public:
  RunningCall();
  ~RunningCall();
  RunningCall(RunningCall&& other) noexcept : calls_(std::exchange(other.calls_, nullptr)) {}
  RunningCall& operator=(RunningCall&& other) noexcept {
    std::swap(calls_, other.calls_);
    return *this;
  }

 private:
  ThreadCalls* calls_;
};

/// How things stood before a try: what must come back afterwards, and where random numbers
/// continue. Cheap, because it is taken on the path of a call that fits.
class BRIM_API Checkpoint {
 public:
  /// What is noted of an accelerator: reading how much of its memory is held takes microseconds,
  /// many times the rest. Without it a first failed try is not checked for memory that did not come
  /// back; the tries after it are.
  enum class Detail : std::uint8_t { all, cheap };

  explicit Checkpoint(const AdaptOptions& options, Detail detail = Detail::all);

  /// The device that the options mean: the one that they name, or the current one. That is asked
  /// for when it is needed, after a failure or for all details: the driver takes its time.
  c10::Device device() const;

  /// Bytes that tensors held on `device` when this was taken; empty for a device that was not
  /// watched.
  std::optional<std::int64_t> held(c10::Device device) const;

  void restore_random_state() const;

 private:
  RunningCall running_;
  mutable std::optional<c10::Device> device_;
  std::int64_t cpu_held_;
  std::optional<std::int64_t> device_held_;  // of an accelerator
  std::optional<RandomState> random_;
};

}  // namespace brim
