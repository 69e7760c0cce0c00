#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "adaptive_config.h"

namespace brim::python {

/// The callable that a decorator returns: it runs `function` as `config` says, binds as a method,
/// carries attributes, and has the decorated function as `__wrapped__`.
pybind11::object make_adaptive_function(const pybind11::object& function,
                                        std::shared_ptr<const AdaptiveConfig> config);

pybind11::object adaptive_function_type();

}  // namespace brim::python
