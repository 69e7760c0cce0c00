#pragma once

#include <brim/adapt/detail/driver.h>
#include <brim/memory/out_of_memory.h>
#include <pybind11/pybind11.h>

#include <exception>
#include <string>
#include <type_traits>

#include "interpreter.h"

namespace brim::python {

/// What a Python exception object says about memory. The caller holds the GIL.
OomCause classify_python(pybind11::handle exception);

/// What the exception says; empty where its `__str__` fails.
std::string error_text(pybind11::handle exception);

/// Teaches brim::classify about Python exceptions that pass through C++ code.
void install_python_classifier();

/// Takes the pending Python exception and releases it, with its frames and all that they hold.
/// @throws pybind11::error_already_set with that very exception if it is not about memory.
detail::Failure release_pending_error();

/// Raises what is left of a Python exception as c10::OutOfMemoryError.
[[noreturn]] void throw_out_of_memory(const detail::Failure& failure);

/// Not a std::exception, so that nothing in the core takes it for a failure of the work: Ctrl-C and
/// the like.
struct Interrupted {
  std::exception_ptr error;
};

template <class Work>
auto telling_interrupts(const Work& work) {
  try {
    return work();
  } catch (const pybind11::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) {
      // NOLINTNEXTLINE(bugprone-std-exception-baseclass): no failure, which the check would take
      throw Interrupted{std::current_exception()};
    }
    throw;
  }
}

/// Makes `brim.RankError`, which a RankError of the core becomes.
void register_rank_error(pybind11::module_& m);

/// Makes the Python exception that torch makes of a C++ one: of c10::ValueError a ValueError, of
/// c10::OutOfMemoryError a torch.OutOfMemoryError. The pure parts of the core, which know no torch,
/// throw std::invalid_argument: a ValueError too. Of a RankError it is brim's own.
void set_python_error(const std::exception_ptr& error);

/// Calls into Python from C++. Out of memory there arrives here as c10::OutOfMemoryError, after the
/// Python exception and with it the frames and tensors of the failed attempt have been released;
/// every other exception passes untouched. The caller holds the GIL.
template <class... Arguments>
pybind11::object call_python(const pybind11::object& function, const Arguments&... arguments) {
  try {
    return invoke(function, arguments...);
  } catch (pybind11::error_already_set& error) {
    error.restore();
  }
  throw_out_of_memory(release_pending_error());
}

/// Runs the body of a function that the interpreter calls. It returns an object, or what such a
/// function returns; what it throws becomes Python's exception. `entering_python` is a last net
/// here: what the body holds has been unwound when it stops the thread.
template <class Body>
PyObject* called_by_python(const Body& body) noexcept {
  try {
    if constexpr (std::is_pointer_v<std::invoke_result_t<const Body&>>) {
      return entering_python(body);
    } else {
      return entering_python(body).release().ptr();
    }
  } catch (...) {
    set_python_error(std::current_exception());
    return nullptr;
  }
}

/// Runs Python's garbage collector. The caller holds the GIL.
inline void collect_garbage() { invoke(attribute(pybind11::module_::import("gc"), "collect")); }

}  // namespace brim::python
