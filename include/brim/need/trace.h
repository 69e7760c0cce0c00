#pragma once

#include <brim/export.h>
#include <brim/memory/allocation_event.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

namespace brim {

class MemoryTrace;

/// What a call asked its allocator for and gave back, in order: recorded from a run, up to a
/// failure, or traced on fake tensors. Traces at two sizes show how each request grows.
class BRIM_API Trace {
 public:
  static constexpr std::int32_t kNone = -1;

  struct Request {
    std::int64_t bytes = 0;
    std::int64_t stream = 0;
    std::int64_t address = 0;     ///< where the block lay
    std::int32_t operation = -1;  ///< the operator that asked, in the order in which they began
    std::uint64_t name = 0;       ///< its name, as a hash
    std::uint64_t path = 0;       ///< with the names of those inside it
    bool freed = false;           ///< by the call
    /// Of a block that was held before: the request whose block the next call will free at this
    /// point; kNone where there is none.
    std::int32_t successor = kNone;
    /// The block of the same request of the call before was there during the whole call: such
    /// blocks are not replaced but add up.
    bool adds_up = false;
    /// Of a block that was held before: a failed attempt had made it, which the next call will not
    /// find.
    bool from_failure = false;
    bool made_again = false;  ///< the call then made it itself
  };

  std::vector<Request> requests;
  /// The first so many of them were held before the work, which freed them.
  std::size_t older = 0;
  /// n: the request n is made; ~n: it is freed.
  std::vector<std::int32_t> events;
  /// Whether the work ended well. Else its last request was refused, and is the last event.
  bool complete = true;
  /// Whether it went on after a request had been refused: a library that can do with a smaller
  /// workspace, as cuDNN.
  bool tolerates_refusal = false;
  /// Whether it was traced on fake tensors, and did not run. Its operators have other names than
  /// those of a run.
  bool foreseen = false;
  /// Of fake tensors: the event at which another call begins, which finds what the first one left;
  /// 0 if there is none. The successor of a request of the first is then that of the other.
  std::size_t later = 0;
};

/// @param events at most 2^30 of them.
/// @param complete whether the work ended well, and not with the last request that was refused.
/// @param before the trace of the call before, null if there is none.
/// @param failed those of failed attempts since: what they freed, the next call will free itself.
/// @param in_use whether the block at an address, which that call left, is in use now.
[[nodiscard]] BRIM_API std::shared_ptr<const Trace> trace_of(
    std::span<const AllocationEvent> events, bool complete = true, const Trace* before = nullptr,
    std::span<const std::shared_ptr<const Trace>> failed = {},
    const std::function<bool(std::int64_t)>& in_use = {});

/// Traced on fake tensors: what comes after the event `start`. The places stand for operators.
[[nodiscard]] BRIM_API std::shared_ptr<const Trace> trace_of(const MemoryTrace& trace,
                                                             std::int64_t start);

/// Of one request of so many bytes: all that is known of a call whose requests were not recorded.
[[nodiscard]] std::shared_ptr<const Trace> trace_of_peak(std::int64_t bytes);

/// By request of `from`: the same one of `to`, kNone where it has none. They are matched operator
/// by operator, so that a workspace that only one of them has stays inside its operator.
[[nodiscard]] BRIM_API std::vector<std::int32_t> matched(const Trace& from, const Trace& to);

}  // namespace brim
