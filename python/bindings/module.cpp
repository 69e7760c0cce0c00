#include <brim/runtime.h>
#include <torch/csrc/Exceptions.h>

#include "bindings.h"
#include "python_error.h"

namespace {

namespace py = pybind11;

/// Every C++ exception that leaves our functions becomes the Python exception that torch makes of
/// it: c10::ValueError a ValueError, c10::OutOfMemoryError a torch.OutOfMemoryError.
void translate(std::exception_ptr error) {
  if (error) {
    torch::translate_exception_to_python(error);
  }
}

/// Waits without the GIL. Not by pybind11's guard, whose destructor would end the process where
/// Python ends this thread because the interpreter is finalizing.
void wait_without_gil(void (*wait)(const void*), const void* context) {
  if (PyGILState_Check() == 0) {
    wait(context);
    return;
  }
  std::exception_ptr error;
  PyThreadState* const state = PyEval_SaveThread();
  try {
    wait(context);
  } catch (...) {
    error = std::current_exception();
  }
  PyEval_RestoreThread(state);
  if (error) {
    std::rethrow_exception(error);
  }
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "brim's C++ core";
  py::register_local_exception_translator(&translate);
  m.attr("__version__") = brim::version();
  m.attr("built_with_torch") = brim::built_with_torch();
  brim::python::install_python_classifier();
  brim::set_waiter(&wait_without_gil);
  brim::python::register_memory(m);
  brim::python::register_predict(m);
  brim::python::register_adapt(m);
  brim::python::register_batching(m);
  brim::python::register_buckets(m);
  brim::python::register_nn(m);
  brim::python::register_testing(m);
}
