#pragma once

#include <brim/adapt/options.h>
#include <brim/memory/host_limit.h>

#include <atomic>
#include <cstdint>

namespace brim {

/// An adaptive call, or a part of one, as long as it lives. Other threads know of it: one that runs
/// out of memory waits for the others before giving up. On the CPU it gets what the machine has.
/// Belongs to its thread.
class RunningCall {
 public:
  /// How many there have been on a thread. Only that thread writes, so that a call that fits pays
  /// for no lock and for no cache line that others write to.
  using Count = std::atomic<std::uint64_t>;
  struct Counts {
    Count begun{0};
    Count ended{0};
    detail::ThreadHostLimit& host_limit;  ///< of the same thread, to be found with them
  };

  explicit RunningCall(const AdaptOptions& options);
  ~RunningCall() { increment(counts_.ended); }
  RunningCall(const RunningCall&) = delete;
  RunningCall& operator=(const RunningCall&) = delete;

 private:
  /// Relaxed, since a release delays the next call by 8 ns on Arm. Who sees that a call has ended
  /// tries again microseconds later, when the memory that it gave back is seen too.
  static void increment(Count& count) {
    count.store(count.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }

  Counts& counts_;  // of this thread
  HostLimit host_limit_;
};

}  // namespace brim
