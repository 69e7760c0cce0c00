// Regions of brim.saving(), and those of converted modules. Without pybind11 where each call of a
// module passes.

#include "regions.h"

#include "bindings.h"

namespace brim::python {

using nn::Recompute;
using nn::Saving;

Recompute level_of(PyObject* recompute) {
  const auto is = [&](const char* name) {
    return PyUnicode_Check(recompute) != 0 &&
           PyUnicode_CompareWithASCIIString(recompute, name) == 0;
  };
  return recompute == Py_None ? Recompute::nothing
         : is("cheap")        ? Recompute::cheap
         : is("auto")         ? Recompute::automatic
                              : Recompute::products;
}

namespace {

/// In C++, as Python could be interrupted between a region's end and `finally`.
extern "C" PyObject* within(PyObject* /*self*/, PyObject* const* values, Py_ssize_t count,
                            PyObject* names) {
  if (count < 2) {
    PyErr_SetString(PyExc_TypeError, "within takes a level and a function with its arguments");
    return nullptr;
  }
  const InModuleRegion in_region(values[0]);
  return PyObject_Vectorcall(values[1], values + 2, static_cast<std::size_t>(count - 2), names);
}

/// Of users. In C++ for the same reason.
class Region {
 public:
  explicit Region(const py::object& recompute) : recompute_(level_of(recompute.ptr())) {}

  void enter() {
    around_.push_back(Saving::state());
    Saving::set_state(Saving::within(recompute_, /*of_module=*/false));
  }

  void exit() {
    if (!around_.empty()) {
      Saving::set_state(around_.back());
      around_.pop_back();
    }
  }

 private:
  Recompute recompute_;
  std::vector<Saving::State> around_;
};

PyMethodDef methods[] = {
    {"within",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&within)),  // its flags say so
     METH_FASTCALL | METH_KEYWORDS,
     "within(recompute, function, *args, **kwargs): call the function in a region of a module."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void register_regions(py::module_& m) {
  py::class_<Saving::State>(m, "RegionState", "The region that is in force in a thread.")
      .def("__eq__",
           [](const Saving::State& state, const Saving::State& other) { return state == other; });
  m.def("region_state", &Saving::state);
  py::class_<Region>(m, "Region", "The `with` block of brim.saving(); can be entered again.")
      .def(py::init<const py::object&>())
      .def("__enter__",
           [](const py::object& self) {
             self.cast<Region&>().enter();
             return self;
           })
      .def("__exit__", [](Region& self, const py::args& /*error*/) { self.exit(); });
  m.def("pause_regions", [] {
    Saving::State state = Saving::state();
    state.is_paused = true;
    Saving::set_state(state);
  });
  m.def("leave_region", &Saving::leave);
  m.def("come_back", &Saving::come_back);
  if (PyModule_AddFunctions(m.ptr(), methods) != 0) {
    throw py::error_already_set();
  }
}

}  // namespace brim::python
