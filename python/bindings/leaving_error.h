#pragma once

#include <pybind11/pybind11.h>

namespace brim::python {

/// This thread runs an adaptive call: what fails inside of it may be tried again.
class InAdaptiveCall {
 public:
  InAdaptiveCall() { ++depth; }
  ~InAdaptiveCall() { --depth; }
  InAdaptiveCall(const InAdaptiveCall&) = delete;
  InAdaptiveCall& operator=(const InAdaptiveCall&) = delete;

  static bool is_any() { return depth > 0; }

 private:
  static thread_local int depth;
};

/// Has Python explain an out-of-memory error that leaves brim, see brim.explain. Others, and those
/// inside of an adaptive call, are left alone. Nothing is raised. The caller holds the GIL.
/// @param device None: the one that the error names.
void explain_leaving(pybind11::handle error, const pybind11::object& device) noexcept;

/// The same of the pending exception, which stays pending.
void explain_pending_error() noexcept;

}  // namespace brim::python
