#include "leaving_error.h"

#include "interpreter.h"
#include "python_error.h"

namespace brim::python {
namespace py = pybind11;

thread_local int InAdaptiveCall::depth = 0;

void explain_leaving(py::handle error, const py::object& device) noexcept {
  try {
    if (!InAdaptiveCall::is_any() && classify_python(error)) {
      release(invoke(provided("explain_leaving"), error, device));
    }
  } catch (const py::error_already_set& failure) {
    if (failure.matches(PyExc_KeyboardInterrupt)) {
      PyErr_SetInterrupt();  // raised again where the program goes on
    }
  } catch (...) {
    // The program's own error counts more.
  }
}

void explain_pending_error() noexcept {
  try {
    py::error_already_set pending;
    explain_leaving(pending.value(), py::none());
    pending.restore();
  } catch (...) {
    // There was none.
  }
}

}  // namespace brim::python
