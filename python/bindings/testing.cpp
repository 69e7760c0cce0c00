#include <brim/testing/clock_by_hand.h>
#include <brim/testing/oom_injector.h>

#include <chrono>
#include <cmath>
#include <memory>

#include "bindings.h"
#include "context_manager.h"
#include "python_error.h"

namespace brim::python {
void register_testing(py::module_& m) {
  using PyOomInjector =
      ContextManager<testing::OomInjector, std::int64_t, std::int64_t, c10::Device>;
  PyOomInjector::bind(m, "OomInjector",
                      R"(Makes chosen allocations in a `with` block fail; `inject_oom` makes one.

Example:
    >>> import brim, torch
    >>> with brim.testing.inject_oom(at=2) as injector:
    ...     x = torch.zeros(10)
    >>> injector.allocations, injector.failures
    (1, 0)
)")
      .def(py::init([](const py::object& at, const py::object& count, const py::object& device) {
             const std::int64_t first = integer_argument("at", at);
             const std::int64_t failures = integer_argument("count", count);
             const c10::Device where = device_argument(device);
             testing::OomInjector::check_arguments(first, failures, where);
             return std::make_unique<PyOomInjector>("injector", first, failures, where);
           }),
           py::arg("at"), py::arg("count"), py::arg("device"))
      .def_property_readonly(
          "allocations",
          [](const PyOomInjector& self) {
            return self.entered() ? self.object().allocations() : 0;
          },
          "How many allocations there were.")
      .def_property_readonly(
          "failures",
          [](const PyOomInjector& self) { return self.entered() ? self.object().failures() : 0; },
          "How many of them failed.");
  ContextManager<testing::ClockByHand>::bind(m, "ClockByHand",
                                             "Time stands still but for `advance`.")
      .def(py::init([] { return std::make_unique<ContextManager<testing::ClockByHand>>("clock"); }))
      .def("advance", [](ContextManager<testing::ClockByHand>& self, double seconds) {
        self.object().advance(std::chrono::nanoseconds(std::llround(seconds * 1e9)));
      });
  // Lets a test see what a Python callback's error becomes on its way through C++ and back.
  m.def(
      "call_through_cpp", [](const py::object& function) { return call_python(function); },
      py::arg("function"));
}

}  // namespace brim::python
