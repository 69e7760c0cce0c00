#pragma once

#include <brim/adapt/detail/checkpoint.h>
#include <brim/adapt/detail/driver.h>
#include <brim/adapt/options.h>
#include <brim/memory/peak_meter.h>
#include <brim/need/trace.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "clock.h"
#include "memory/allocation_log.h"

namespace brim {

/// Whether a request failed although there was room for it, so that cached memory was in the way.
/// Torch takes an accelerator's memory in steps of 2 MiB, and prints GiB with two digits: what is
/// closer to the limit may not have fitted.
inline bool should_have_fitted(const OomCause& cause, std::int64_t limit) {
  constexpr std::int64_t kDoubt = std::int64_t{8} << 20;
  return cause.in_use && cause.requested && *cause.in_use + *cause.requested <= limit - kDoubt;
}

/// Watches the attempts of one adaptive call: measures them, cleans up after a failed one, and
/// tells observers. It does not choose sizes.
class AttemptMonitor {
 public:
  AttemptMonitor(const AdaptOptions& options, Checkpoint checkpoint);

  /// Where things stand before the next attempt; a call in parts renews it before each part.
  void renew(Checkpoint checkpoint) {
    checkpoint_ = std::move(checkpoint);
    needed_release_.reset();
    released_ = false;
    failed_.clear();
  }
  const Checkpoint& checkpoint() const { return checkpoint_; }

  /// Starts to measure an attempt. One that was not begun (the first one, on the fast path) has no
  /// time, and its peak comes from what the error says.
  /// @param new_size whether an accelerator's cache is released first. It holds blocks cut for
  ///     another size, between which the new ones may not fit. Then the requests are recorded.
  /// @param record whether they are in any case.
  /// @param before the trace of the last fit, null if it is not known.
  /// @param expected bytes that it is to need, where it was chosen for that.
  void begin(bool new_size, bool record, std::shared_ptr<const Trace> before = nullptr,
             std::optional<std::int64_t> expected = {});

  /// Starts to measure an attempt for observers only: what `failed` returns is the same as for one
  /// that was not begun.
  void begin_observed();

  Attempt fitted(std::span<const std::int64_t> values);

  /// To be called when the exception is gone and with it all that it kept alive. Checks that the
  /// memory of the failed attempt came back, collects garbage if not, and warns if even that did
  /// not help. The attempt that it returns has no bytes where they say nothing about the device
  /// that is watched.
  /// @return empty where cached memory was in the way and has been released: the same values are
  ///     to be tried again.
  std::optional<Attempt> failed(std::span<const std::int64_t> values,
                                const detail::Failure& failure);

  /// A failure at the values that fitted last, if these fitted only after a release. The next call
  /// would fail like that again.
  const std::optional<Attempt>& needed_release() const { return needed_release_; }

  /// At the floor: returns when an adaptive call of another thread has ended and may have given
  /// memory back. It waits for 30 s at most in the whole call.
  /// @throws c10::OutOfMemoryError with the last message and a summary of all attempts where there
  ///     is nothing to wait for, where the others stand still, or where the time is over.
  void wait_for_others_or_give_up();

 private:
  void publish(const Attempt& attempt);
  [[noreturn]] void give_up(c10::Device device) const;
  void wait_for_memory(c10::Device device, std::int64_t attempt_peak);
  c10::Device tightest_device() const;
  /// What was recorded on the device; the recording ends.
  std::vector<AllocationEvent> take_log(c10::Device device);

  const AdaptOptions& options_;
  Checkpoint checkpoint_;
  std::optional<PeakMeter> meter_;
  std::shared_ptr<const Trace> before_;
  std::optional<std::int64_t> expected_;
  std::vector<std::shared_ptr<const Trace>> failed_;  // since the last fit
  std::optional<AllocationLog> log_;
  std::optional<AllocationLog> host_log_;  // beside an accelerator's, where both are watched
  Clock::time_point begun_;
  std::int64_t given_up_ = 0;      // in this process, when the attempt began
  std::vector<Attempt> failures_;  // the newest few, for the summary
  std::string last_message_;
  std::optional<c10::Device> failed_on_;
  std::optional<Attempt> needed_release_;  // the last failure whose values were to be tried again
  bool released_ = false;                  // the cache, right before this attempt
  bool only_observed_ = false;             // this attempt
  bool warned_ = false;
  bool hopeless_ = false;  // the last failure would happen on an empty device too
  std::optional<std::chrono::steady_clock::time_point> deadline_;  // of waiting for others
  std::uint64_t ended_elsewhere_ = 0;  // calls, when the attempt began; 0 where it was not watched
};

}  // namespace brim
