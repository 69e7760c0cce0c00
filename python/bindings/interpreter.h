#pragma once

// The borders between our code and the interpreter, where a thread may be ended.

#include <cxxabi.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <exception>
#include <optional>
#include <type_traits>

namespace brim::python {

/// Runs `work`, which enters Python or takes the GIL. Where the interpreter is finalizing, Python
/// ends a thread that asks for the GIL by unwinding its stack, up to 3.13. Our frames must not take
/// part: they hold Python objects, which nobody may touch any more, and a handler that swallows the
/// unwinding aborts the process. So the thread stops here for good, as Python 3.14 has it.
template <class Work>
decltype(auto) entering_python(const Work& work) {
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

}  // namespace brim::python
