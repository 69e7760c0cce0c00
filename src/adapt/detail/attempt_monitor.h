#pragma once

#include <brim/adapt/detail/checkpoint.h>
#include <brim/adapt/options.h>
#include <brim/memory/out_of_memory.h>
#include <brim/memory/peak_meter.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace brim {

/// Watches the tries of one adaptive call: measures them, cleans up after a failed one, finds out
/// why it failed, and tells whoever wants to know. It does not choose sizes.
class AttemptMonitor {
 public:
  AttemptMonitor(const AdaptOptions& options, Checkpoint checkpoint);

  /// Where things stand before the next try; a call in parts renews it before each part.
  void renew(Checkpoint checkpoint) { checkpoint_ = std::move(checkpoint); }
  const Checkpoint& checkpoint() const { return checkpoint_; }

  /// Starts to measure a try. A try that was not begun (the first one, on the fast path) has no
  /// time, and its peak comes from what the error says.
  void begin();

  Attempt fitted(std::span<const std::int64_t> values);

  /// To be called when the exception is gone and with it all that it kept alive. Checks that the
  /// memory of the failed try came back, has garbage collected if not, and warns if even that did
  /// not help. What it returns has no bytes where they say nothing about the device that is
  /// watched.
  /// @return empty where cached memory was in the way and has been released: the same values are
  ///     to be tried again.
  std::optional<Attempt> failed(std::span<const std::int64_t> values, const OomCause& cause,
                                const std::string& message);

  /// Before giving up: waits until an adaptive call of another thread ends and may have given
  /// memory back, 30 s at most for the whole call. False where there is nothing to wait for, where
  /// the others stand still, or where the time is over.
  bool wait_for_others();

  /// Raises c10::OutOfMemoryError with the last message and a summary of all tries.
  [[noreturn]] void give_up() const;

 private:
  void publish(const Attempt& attempt);
  void wait_for_memory(c10::Device device, std::int64_t attempt_peak);
  c10::Device tightest_device() const;

  const AdaptOptions& options_;
  Checkpoint checkpoint_;
  std::optional<PeakMeter> meter_;
  std::chrono::steady_clock::time_point begun_;
  std::vector<Attempt> tries_;  // the newest few, for the summary
  std::string last_message_;
  std::optional<c10::Device> failed_on_;
  std::vector<std::int64_t> released_for_;  // values that were tried again after a release
  bool warned_ = false;
  bool hopeless_ = false;  // the last failure would happen on an empty device too
  std::optional<std::chrono::steady_clock::time_point> deadline_;  // of waiting for others
  std::uint64_t ended_elsewhere_ = 0;  // calls, when the try began; 0 where it was not watched
};

}  // namespace brim
