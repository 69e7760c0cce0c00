#pragma once

#include <brim/memory/out_of_memory.h>
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>

#include <string>
#include <utility>

namespace brim::python {

/// What a Python exception object says about memory. The caller holds the GIL.
OomCause classify_python(pybind11::handle exception);

/// What the exception says; empty where its `__str__` fails.
std::string error_text(pybind11::handle exception);

/// Teaches brim::classify about Python exceptions that pass through C++ code.
void install_python_classifier();

/// Calls into Python from C++. Out of memory there arrives here as c10::OutOfMemoryError, after the
/// Python exception and with it the frames and tensors of the failed attempt have been released;
/// every other exception passes untouched. The caller holds the GIL.
template <class... Arguments>
pybind11::object call_python(const pybind11::object& function, Arguments&&... arguments) {
  std::string message;
  try {
    return function(std::forward<Arguments>(arguments)...);
  } catch (pybind11::error_already_set& error) {
    const OomCause cause = classify_python(error.value());
    if (!cause) {
      throw;
    }
    message = error_text(error.value());
    // A MemoryError is known by its type alone; as c10::OutOfMemoryError its text must tell.
    if (cause.kind == OomKind::host_memory && !classify_message(message)) {
      message = "CPU out of memory. " + message;
    }
  }
  TORCH_CHECK_WITH(OutOfMemoryError, false, message);
}

/// Runs Python's garbage collector. The caller holds the GIL.
inline void collect_garbage() { pybind11::module_::import("gc").attr("collect")(); }

}  // namespace brim::python
