#pragma once

// The borders between our code and the interpreter, where a thread may be ended.

#include <brim/batching/interruption.h>
#include <cxxabi.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <chrono>
#include <exception>
#include <optional>
#include <type_traits>
#include <utility>

namespace brim::python {

/// Runs `work`, which enters Python or takes the GIL. Where the interpreter is finalizing, Python
/// ends a thread that asks for the GIL by unwinding its stack, up to 3.13. Our frames must not take
/// part: they hold Python objects, which nobody may touch any more, and a handler that swallows the
/// unwinding aborts the process. So the thread stops here for good, as Python 3.14 has it.
///
/// `work` is one call of Python's C API and owns nothing: its own frame is unwound. Where Python
/// code may run in an adaptive call, use this or what follows, not pybind11's calls, which own
/// their arguments.
/// UBSan calls what GCC catches then a null reference.
template <class Work>
[[gnu::no_sanitize("undefined")]] decltype(auto) entering_python(const Work& work) {
#if defined(__GLIBCXX__)
  try {
    return work();
  } catch (const abi::__forced_unwind&) {
    for (;;) {
      pause();
    }
  }
#else
  return work();
#endif
}

/// The object that a C API function returned. @throws the pending exception where there is none.
inline pybind11::object new_reference(PyObject* result) {
  if (result == nullptr) {
    throw pybind11::error_already_set();
  }
  return pybind11::reinterpret_steal<pybind11::object>(result);
}

/// Calls `function(arguments...)`. @throws pybind11::error_already_set
template <class... Arguments>
pybind11::object invoke(pybind11::handle function, const Arguments&... arguments) {
  const pybind11::tuple owned = pybind11::make_tuple(arguments...);
  return new_reference(
      entering_python([&] { return PyObject_Call(function.ptr(), owned.ptr(), nullptr); }));
}

/// `object.name`, which a property may work out. @throws pybind11::error_already_set
inline pybind11::object attribute(pybind11::handle object, const char* name) {
  return new_reference(entering_python([&] { return PyObject_GetAttrString(object.ptr(), name); }));
}

/// What Python passed to `_C.provide` at import, under this name: the bindings import no module of
/// ours, and nothing late. A static variable that ran Python to be initialised would be a deadlock:
/// that may give the GIL to a thread which then waits for the variable, and keeps the GIL.
pybind11::handle provided(const char* name);

/// Releases an object that may be the last reference to anything, finalisers included.
inline void release(pybind11::object&& object) {
  PyObject* const last = object.release().ptr();
  entering_python([&] { Py_XDECREF(last); });
}

/// Runs `work` without the GIL. pybind11's guard takes it back in a destructor, from which a thread
/// cannot be ended without aborting the process.
template <class Work>
auto without_gil(const Work& work) {
  PyThreadState* const state = PyEval_SaveThread();
  std::exception_ptr error;
  using Result = std::invoke_result_t<const Work&>;
  // NOLINTNEXTLINE(misc-const-correctness): filled where there is a result
  std::conditional_t<std::is_void_v<Result>, bool, std::optional<Result>> result{};
  try {
    if constexpr (std::is_void_v<Result>) {
      work();
    } else {
      result.emplace(work());
    }
  } catch (...) {
    error = std::current_exception();
  }
  entering_python([&] { PyEval_RestoreThread(state); });
  if (error) {
    std::rethrow_exception(error);
  }
  if constexpr (!std::is_void_v<Result>) {
    return std::move(*result);
  }
}

/// Runs long work of brim::batching without the GIL, and lets Ctrl-C and other signals through.
/// @throws pybind11::error_already_set with what a handler raised, which ends the work.
template <class Work>
auto interruptibly(const Work& work) {
  return without_gil([&] {
    using SteadyClock = std::chrono::steady_clock;
    constexpr std::chrono::milliseconds kBetweenLooks(50);
    auto next_look = SteadyClock::now() + kBetweenLooks;
    const batching::InterruptionGuard guard([&] {
      if (SteadyClock::now() < next_look) {
        return;
      }
      PyGILState_STATE state{};
      entering_python([&] { state = PyGILState_Ensure(); });
      const bool raised = entering_python([&] { return PyErr_CheckSignals(); }) != 0;
      std::exception_ptr error;
      if (raised) {
        error = std::make_exception_ptr(pybind11::error_already_set());
      }
      PyGILState_Release(state);
      if (error) {
        std::rethrow_exception(error);
      }
      next_look = SteadyClock::now() + kBetweenLooks;
    });
    return work();
  });
}

}  // namespace brim::python
