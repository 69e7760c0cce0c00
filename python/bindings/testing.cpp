#include <brim/testing/oom_injector.h>

#include <optional>

#include "bindings.h"
#include "python_error.h"

namespace brim::python {
namespace {

/// A context manager around OomInjector. Arguments are checked when it is made, counting starts at
/// `with`.
class PyOomInjector {
 public:
  PyOomInjector(const py::object& at, const py::object& count, const py::object& device)
      : at_(integer_argument("at", at)),
        count_(integer_argument("count", count)),
        device_(device_argument(device)) {
    testing::OomInjector::check_arguments(at_, count_, device_);
  }

  PyOomInjector& enter() {
    TORCH_CHECK(!running_, "this injector is open already: use a second one to nest");
    injector_.emplace(at_, count_, device_);
    running_ = true;
    return *this;
  }

  void exit() {
    TORCH_CHECK(running_, "this injector is not open");
    injector_->close();
    running_ = false;
  }

  std::int64_t allocations() const { return injector_ ? injector_->allocations() : 0; }
  std::int64_t failures() const { return injector_ ? injector_->failures() : 0; }

 private:
  std::int64_t at_;
  std::int64_t count_;
  c10::Device device_;
  std::optional<testing::OomInjector> injector_;
  bool running_ = false;
};

}  // namespace

void register_testing(py::module_& m) {
  py::class_<PyOomInjector>(m, "OomInjector")
      .def(py::init<const py::object&, const py::object&, const py::object&>(), py::arg("at"),
           py::arg("count"), py::arg("device"))
      .def("__enter__", &PyOomInjector::enter, py::return_value_policy::reference_internal)
      .def("__exit__", [](PyOomInjector& self, const py::args&) { self.exit(); })
      .def_property_readonly("allocations", &PyOomInjector::allocations)
      .def_property_readonly("failures", &PyOomInjector::failures);
  // Lets a test see what a Python callback's error becomes on its way through C++ and back.
  m.def(
      "call_through_cpp", [](const py::object& function) { return call_python(function); },
      py::arg("function"));
}

}  // namespace brim::python
