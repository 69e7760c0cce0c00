#pragma once

#include <brim/adapt/detail/driver.h>
#include <brim/adapt/options.h>
#include <brim/adapt/parameter_search.h>
#include <brim/adapt/saved_state.h>
#include <brim/need/size_search.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "adapt/detail/attempt_history.h"
#include "adapt/detail/part_trials.h"

/// What the loops of `maximize` and `range` share.
namespace brim::detail {

/// @throws c10::ValueError naming the option that is wrong.
void check_options(const AdaptOptions& options);

ParameterSearch make_search(const MaximizeCall& call, const AdaptOptions& options,
                            const AttemptHistory& known, const PartTrials& trials,
                            c10::Device device);
SizeSearch make_search(std::int64_t upper, const AdaptOptions& options, const AttemptHistory& known,
                       c10::Device device);

/// Wider kinds of call learn from the first call of a new kind and from failures.
void learn(const AdaptOptions& options, const AttemptHistory& known, const Attempt& attempt);

/// Whether a block at an address, which a recorded attempt left on the device, is in use now.
std::function<bool(std::int64_t)> blocks_in_use(c10::Device device);

/// Saves what the options name. If there is no memory for the copies, garbage and caches make room
/// once. Null where nothing is named.
std::unique_ptr<SavedState> save_state(const AdaptOptions& options);

/// What an error says, without a backtrace.
std::string error_text(const std::exception_ptr& error);

/// For Objective::throughput: items or calls per second; 0 else.
double rate(const AdaptOptions& options, const Attempt& attempt, const MaximizeCall& call);
double rate(const AdaptOptions& options, const Attempt& attempt, std::int64_t done);

/// Whether the work has collectives inside, in which other ranks may wait for one that failed.
bool cannot_repeat(const AdaptOptions& options);

/// After a failure in such work. @throws c10::OutOfMemoryError with what it was about.
[[noreturn]] void give_up_inside(const Failure& failure);

}  // namespace brim::detail
