#pragma once

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>

#include <string>
#include <utility>
#include <vector>

#include "interpreter.h"

namespace brim::python {

/// Collects what the core warns of on this thread, for Python to hear when the call ends. Not
/// torch's PyWarningHandler: that one throws from its destructor where warnings are errors, which
/// ends the process when another exception is on its way, and loses the result where none is.
class CoreWarnings final : public c10::WarningHandler {
 public:
  CoreWarnings() = default;
  CoreWarnings(const CoreWarnings&) = delete;
  CoreWarnings& operator=(const CoreWarnings&) = delete;

  /// What was not delivered is said beside an exception, which is what the caller gets.
  ~CoreWarnings() override {
    if (texts_.empty()) {
      return;
    }
    const pybind11::error_scope pending;
    for (const std::string& text : std::exchange(texts_, {})) {
      if (!warn(text)) {
        PyErr_Clear();  // there can be but one exception, and it is the other one
      }
    }
  }

  void process(const c10::Warning& warning) override { texts_.push_back(warning.msg()); }

  /// Hands them to Python. @throws pybind11::error_already_set where one of them is an error.
  void deliver() {
    for (const std::string& text : std::exchange(texts_, {})) {
      if (!warn(text)) {
        throw pybind11::error_already_set();
      }
    }
  }

 private:
  /// False where the warning is an error.
  static bool warn(const std::string& text) {
    return entering_python([&] { return PyErr_WarnEx(PyExc_UserWarning, text.c_str(), 1); }) == 0;
  }

  std::vector<std::string> texts_;
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};

}  // namespace brim::python
