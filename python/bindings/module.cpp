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

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "brim's C++ core";
  py::register_local_exception_translator(&translate);
  m.attr("__version__") = brim::version();
  m.attr("built_with_torch") = brim::built_with_torch();
  brim::python::install_python_classifier();
  brim::python::register_memory(m);
  brim::python::register_predict(m);
  brim::python::register_adapt(m);
  brim::python::register_batching(m);
  brim::python::register_buckets(m);
  brim::python::register_nn(m);
  brim::python::register_testing(m);
}
