#include <brim/runtime.h>
#include <brim/version.h>
#include <c10/util/Exception.h>

#include <string>
#include <string_view>

#include "bindings.h"
#include "interpreter.h"
#include "python_error.h"

namespace {

namespace py = pybind11;

void translate(std::exception_ptr error) {
  if (error) {
    brim::python::set_python_error(error);
  }
}

void wait_without_gil(void (*wait)(const void*), const void* context) {
  if (PyGILState_Check() == 0) {
    wait(context);
    return;
  }
  brim::python::without_gil([&] { wait(context); });
}

void throw_after_ctrl_c() {
  if (PyGILState_Check() != 0 && PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
}

/// The loader takes a libbrim that is in the process already, whichever it is.
void check_library() {
  try {
    brim::check_only_copy();
  } catch (const c10::Error& error) {
    throw py::import_error(error.what_without_backtrace());
  }
  const std::string_view loaded = brim::version();
  if (loaded != BRIM_VERSION_STRING) {
    throw py::import_error("this is brim " BRIM_VERSION_STRING ", but another library has loaded " +
                           ("libbrim " + std::string(loaded)) +
                           " into the process: link it to the libbrim in brim/lib");
  }
}

/// Filled at import and held for the life of the process.
py::dict& provisions() {
  static auto* const all = new py::dict();
  return *all;
}

}  // namespace

py::handle brim::python::provided(const char* name) {
  PyObject* const found = PyDict_GetItemString(provisions().ptr(), name);
  TORCH_CHECK(found != nullptr, "brim is not imported yet: there is no `", name, "`");
  return found;
}

PYBIND11_MODULE(_C, m) {
  m.doc() = "brim's C++ core";
  check_library();
  py::register_local_exception_translator(&translate);
  m.attr("__version__") = brim::version();
  m.attr("built_with_torch") = brim::built_with_torch();
  m.def(
      "provide", [](const py::kwargs& named) { PyDict_Update(provisions().ptr(), named.ptr()); },
      "Pass in what the bindings call of Python.");
  brim::python::install_python_classifier();
  brim::python::register_rank_error(m);
  brim::set_waiter(&wait_without_gil, &throw_after_ctrl_c);
  brim::python::register_memory(m);
  brim::python::register_predict(m);
  brim::python::register_regions(m);
  brim::python::register_rehearsal(m);
  brim::python::register_blocks(m);
  brim::python::register_allocator_model(m);
  brim::python::register_adapt(m);
  brim::python::register_microbatches(m);
  brim::python::register_mixture(m);
  brim::python::register_batching(m);
  brim::python::register_buckets(m);
  brim::python::register_dist(m);
  brim::python::register_explain(m);
  brim::python::register_live_graphs(m);
  brim::python::register_fake_results(m);
  brim::python::register_fake_tensor(m);
  brim::python::register_fit(m);
  brim::python::register_nn(m);
  brim::python::register_packed_row(m);
  brim::python::register_testing(m);
  brim::python::register_undoing(m);
}
