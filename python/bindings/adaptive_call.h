#pragma once

#include <vector>

#include "adaptive_config.h"

namespace brim::python {

/// Runs `function` with the arguments adapted as `config` says. The result is a new reference, or
/// null with a Python exception set, as CPython's calls do. No C++ exception leaves it.
/// @param attempts where to append each attempt, or null.
PyObject* adaptive_call(const AdaptiveConfig& config, PyObject* function,
                        const CallArguments& arguments, std::vector<Attempt>* attempts) noexcept;

/// Forgets every size that was learned or foreseen.
void forget_all(const AdaptiveConfig& config);

/// Forgets what was learned of calls with these arguments; with a memory per call site, which
/// cannot be known from elsewhere, everything. None, or null with a Python exception set.
PyObject* adaptive_forget(const AdaptiveConfig& config, const CallArguments& arguments) noexcept;

}  // namespace brim::python
