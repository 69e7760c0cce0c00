#pragma once

#include <brim/adapt/detail/checkpoint.h>
#include <brim/adapt/detail/running_call.h>
#include <brim/adapt/options.h>
#include <brim/adapt/size_memory.h>
#include <brim/export.h>
#include <brim/memory/out_of_memory.h>
#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

/// The loops behind all adaptive calls, in every language. An attempt tells its driver "fitted" or
/// "this failure"; how errors are caught is the caller's business.
namespace brim::detail {

/// Why memory ran out in an attempt. The error itself has been released.
struct Failure {
  OomCause cause;
  std::string message;
};

/// An error that is known by its type alone (std::bad_alloc, MemoryError) does not say that memory
/// ran out; the message does.
BRIM_API Failure make_failure(const OomCause& cause, std::string text);

/// On the CPU a backward pass that failed keeps what it had not run yet until the next one on this
/// thread; this runs an empty one. Python's lock must not be held.
BRIM_API void release_failed_backward();

/// Classifies `error` and releases it. @throws the error itself if it is not about memory.
BRIM_API Failure release_error(std::exception_ptr error);

/// Calls the function with these values. Empty where it fitted. Errors that are not about memory
/// are thrown. Without values: releases the result of the last attempt, which another rank's
/// failure undoes.
using TryValues = c10::function_ref<std::optional<Failure>(std::span<const std::int64_t>)>;
/// The same for a part [begin, end) of a range.
using TryPart = c10::function_ref<std::optional<Failure>(std::int64_t, std::int64_t)>;

/// One call of `batch` or `maximize`. Refers to objects of its caller.
struct MaximizeCall {
  std::span<const std::int64_t> maxima;                ///< of each parameter
  std::span<const std::int64_t> quanta;                ///< likewise; 0: that of the options
  std::span<const std::vector<std::size_t>> groups{};  ///< as in ParameterSearchOptions
  const AdaptOptions& options;
  /// The options with what takes time to make (a key, observers): asked for after a first attempt
  /// that failed. Null: `options` has everything.
  c10::function_ref<const AdaptOptions&()> all_options{};
  /// What was traced of the work on fake tensors.
  std::span<const Attempt> foreseen{};
  /// How many items the work divides into parts of this size, all of them in one call; 0: it does
  /// not. Then more parts may be faster than fewer that run under pressure.
  std::int64_t items = 0;
  bool maxima_may_differ = false;   ///< on different ranks
  bool maxima_are_lengths = false;  ///< of this rank's own arguments: they limit no other rank
  bool counts_items = false;        ///< for Objective::throughput: items per second, not calls
  bool on_accelerator = false;      ///< the arguments are on one: worth asking what it holds
};

/// A call before its first attempt. One object, so that a call that fits enters the library once.
struct BegunCall {
  BRIM_API BegunCall(const AdaptOptions& options, Checkpoint::Detail detail);

  RunningCall running;
  Checkpoint checkpoint;
  std::int64_t given_up;  ///< bytes in this process until then; see Attempt
};

/// Whether the first attempt is at the maxima, and teaches nothing if it fits: nothing is known
/// that would change the size. It does not depend on who watches. Wrong options are left to the
/// search, which names them.
inline bool begins_at_maxima(const AdaptOptions& options) noexcept {
  return options.objective == Objective::memory && options.ranks == nullptr &&
         (options.memory == nullptr || !options.memory->may_know_something()) &&
         options.lower >= 1 && options.quantum >= 1;
}

/// Whether such an attempt can go straight to the function: no observer is installed, and nothing
/// is restored after a failure.
inline bool may_run_unwatched(const AdaptOptions& options) noexcept {
  return options.attempts == nullptr && !options.observer && !options.restore &&
         begins_at_maxima(options);
}

/// The attempts of `maximize`, measured.
/// @param failure of a first attempt that was made unwatched.
BRIM_API void maximize_watched(const MaximizeCall& call, Checkpoint&& checkpoint,
                               std::optional<Failure>&& failure, TryValues attempt);

/// After work in parts that fitted unwatched: remembers it if it ran under pressure.
BRIM_API void note_pressure(const MaximizeCall& call, const BegunCall& begun);

/// Calls `attempt` (as TryValues) until it fits, first with the maxima or with what is known to
/// fit. Where nothing is known this costs some ten nanoseconds and allocates nothing, for which the
/// first attempt is inline.
/// @throws c10::ValueError for wrong parameters or options, before any attempt;
///     c10::OutOfMemoryError with a summary if it does not fit even at the floor.
template <class Try>
[[gnu::always_inline]] inline void maximize(const MaximizeCall& call, const Try& attempt) {
  // First of all, as long as the compiler knows it: reading one of four flags that were written as
  // one word stalls an Arm processor for 8 ns.
  const bool on_accelerator = call.on_accelerator;
  const bool starts_anywhere = !call.foreseen.empty();
  const bool unwatched = !starts_anywhere && may_run_unwatched(call.options);
  const bool cheap = unwatched || (!starts_anywhere && begins_at_maxima(call.options));
  const auto detail = cheap && !call.options.device && !on_accelerator ? Checkpoint::Detail::cheap
                                                                       : Checkpoint::Detail::all;
  BegunCall begun(call.options, detail);
  std::optional<Failure> failure = unwatched ? attempt(call.maxima) : std::optional<Failure>();
  if (unwatched && !failure) [[likely]] {
    if (call.items > 0) {
      note_pressure(call, begun);
    }
    return;
  }
  maximize_watched(call, std::move(begun.checkpoint), std::move(failure), attempt);
}

/// Calls `part` for parts that together cover [start, end), each as long as fits, at most
/// `initial`. A part that fitted is never done again. @throws as `maximize`.
BRIM_API void range(std::int64_t start, std::int64_t end, std::int64_t initial,
                    const AdaptOptions& options, TryPart part);

/// How an attempt ended and its bytes, for messages.
BRIM_API std::string describe(const Attempt& attempt);

/// The dimension to cut, counted from the front. @throws c10::ValueError if there is none.
BRIM_API std::int64_t chunk_dim(std::int64_t rank, std::int64_t dim);

}  // namespace brim::detail
