#pragma once

#include <vector>

#include "adaptive_config.h"

namespace brim::python {

/// Runs `function` with the arguments adapted as `config` says. The result is a new reference.
/// @param attempts where to append each attempt, or null.
PyObject* adaptive_call(const AdaptiveConfig& config, PyObject* function,
                        const CallArguments& arguments, std::vector<Attempt>* attempts);

/// Forgets every size that was learned or foreseen.
void forget_all(const AdaptiveConfig& config);

/// Forgets what was learned of calls with these arguments; with a memory per call site, which
/// cannot be known from elsewhere, everything.
void adaptive_forget(const AdaptiveConfig& config, const CallArguments& arguments);

}  // namespace brim::python
