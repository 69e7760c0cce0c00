#pragma once

#include <c10/core/Event.h>

#include <cstddef>
#include <deque>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "clock.h"

// How long it takes to compute again what was given up. On the CPU the clock tells. On an
// accelerator two events in its queue do; they are read when both are over, so no step waits.

namespace brim::nn {

class DeviceSlots;

/// What one device spent. Used under the lock of its slots.
class AgainTimes {
 public:
  using Events = std::pair<c10::Event, c10::Event>;  // the begin and the end

  /// One run that was measured. @param kind of the block that ran; 0 for a single value
  void add(double seconds, std::size_t kind, bool counts);

  /// The same, when both are over.
  void add(Events events, std::size_t kind, bool counts);

  /// To measure the next one with, if there are any that have served before.
  [[nodiscard]] std::optional<Events> unused_events();

  /// How long such a block runs, in seconds; 0 if that is not known.
  [[nodiscard]] double of(std::size_t kind) noexcept;

  /// In seconds, of all runs that are over.
  [[nodiscard]] double total() noexcept;

  void reset();

 private:
  struct Run {
    Events events;
    std::size_t kind = 0;
    bool counts = true;
  };

  void read() noexcept;

  double total_ = 0;
  std::unordered_map<std::size_t, double> kinds_;  // of blocks: their last run
  std::deque<Run> running_;                        // from the oldest to the newest
  std::vector<Events> unused_;
};

/// Measures what runs in its scope. Inside of another one only the outer one counts: to compute a
/// value, others may have to be computed first.
class TimedAgain {
 public:
  /// @param device null: nothing is measured, nor is it of those that are rehearsed
  /// @param kind of the block that runs; 0 for a single value
  /// @param counts else it is only of interest how long such a block runs
  explicit TimedAgain(DeviceSlots* device, std::size_t kind = 0, bool counts = true) noexcept;
  ~TimedAgain();
  TimedAgain(const TimedAgain&) = delete;
  TimedAgain& operator=(const TimedAgain&) = delete;

 private:
  DeviceSlots* slots_;
  std::size_t kind_;
  bool is_outer_ = false;
  Clock::time_point begin_;
  std::optional<AgainTimes::Events> events_;
};

}  // namespace brim::nn
