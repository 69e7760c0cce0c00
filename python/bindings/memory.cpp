#include <brim/memory/budget.h>
#include <brim/memory/bytes.h>
#include <brim/memory/cpu.h>
#include <brim/memory/host_memory.h>
#include <brim/memory/out_of_memory.h>
#include <brim/memory/peak_meter.h>
#include <brim/memory/release.h>
#include <brim/memory/stats.h>
#include <brim/text_table.h>
#include <c10/util/Exception.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "bindings.h"
#include "context_manager.h"
#include "interpreter.h"
#include "python_error.h"

namespace brim::python {
namespace {

std::vector<c10::Device> device_list(const py::object& devices) {
  if (!py::isinstance<py::list>(devices) && !py::isinstance<py::tuple>(devices)) {
    return {resolve_device(device_argument(devices))};
  }
  std::vector<c10::Device> result;
  for (const py::handle device : devices) {
    result.push_back(resolve_device(device_argument(py::reinterpret_borrow<py::object>(device))));
  }
  TORCH_CHECK_VALUE(!result.empty(),
                    "device is an empty list: a PeakMeter needs at least one device");
  return result;
}

using PyPeakMeter = ContextManager<PeakMeter, std::vector<c10::Device>>;
using PyBudget = ContextManager<Budget, ByteLimit, c10::Device>;

ByteLimit limit_argument(const py::object& limit) {
  if (py::isinstance<py::str>(limit)) {
    return ByteLimit::parse(text_of(limit));
  }
  const bool integral = PyIndex_Check(limit.ptr()) != 0 && !py::isinstance<py::bool_>(limit);
  TORCH_CHECK_TYPE(
      integral,
      "limit must be a number of bytes (an int) or a string such as \"512MiB\" or \"50%\", got ",
      py::repr(limit).cast<std::string>());
  return ByteLimit::of_bytes(integer_argument("limit", limit));
}

void register_stats(py::module_& m) {
  py::class_<MemoryStats>(m, "MemoryStats")
      .def_readonly("allocated", &MemoryStats::allocated)
      .def_readonly("peak", &MemoryStats::peak)
      .def_readonly("reserved", &MemoryStats::reserved)
      .def_readonly("limit", &MemoryStats::limit)
      .def_readonly("free", &MemoryStats::free)
      .def_readonly("inactive_split", &MemoryStats::inactive_split)
      .def_readonly("alloc_retries", &MemoryStats::alloc_retries)
      .def_readonly("ooms", &MemoryStats::ooms)
      .def("__str__", [](const MemoryStats& self) { return to_string(self); })
      .def("__repr__", [](const MemoryStats& s) {
        return "MemoryStats(allocated=" + std::to_string(s.allocated) +
               ", peak=" + std::to_string(s.peak) + ", reserved=" + std::to_string(s.reserved) +
               ", limit=" + std::to_string(s.limit) + ", free=" + std::to_string(s.free) + ")";
      });
  py::class_<Fragmentation>(m, "Fragmentation")
      .def_readonly("cached", &Fragmentation::cached)
      .def_readonly("stuck", &Fragmentation::stuck)
      .def_readonly("share", &Fragmentation::share)
      .def_readonly("usable", &Fragmentation::usable)
      .def("explains_failure_of", &Fragmentation::explains_failure_of, py::arg("requested"));
  using Host = HostMemory;
  py::class_<Host>(m, "HostMemory")
      .def_readonly("physical_total", &Host::physical_total)
      .def_readonly("physical_available", &Host::physical_available)
      .def_readonly("resident", &Host::resident)
      .def_readonly("cgroup_limit", &Host::cgroup_limit)
      .def_readonly("cgroup_available", &Host::cgroup_available)
      .def_readonly("address_space_limit", &Host::address_space_limit);
  m.def("host_memory", [] { return read_host_memory(); });
  m.def(
      "memory_stats",
      [](const py::object& device) { return memory_stats(device_argument(device)); },
      py::arg("device") = py::none());
  m.def(
      "reset_peak", [](const py::object& device) { reset_peak(device_argument(device)); },
      py::arg("device") = py::none());
  m.def(
      "release_cached",
      [](const py::object& device) {
        const c10::Device resolved = device_argument(device);
        return without_gil([&] { return release_cached(resolved); });
      },
      py::arg("device") = py::none());
  m.def(
      "fragmentation",
      [](const py::object& device) { return fragmentation(device_argument(device)); },
      py::arg("device") = py::none());
  m.def("default_device", [] { return to_python(default_device()); });
  m.def(
      "format_bytes",
      [](const py::object& bytes) { return format_bytes(integer_argument("bytes", bytes)); },
      py::arg("bytes"));
  m.def("text_table", &text_table, py::arg("head"), py::arg("rows"), py::arg("left") = 1,
        py::arg("last") = std::vector<std::string>());
  m.def(
      "parse_bytes",
      [](const py::object& limit, const py::object& of) {
        const ByteLimit parsed = limit_argument(limit);
        TORCH_CHECK_VALUE(!parsed.is_percentage() || !of.is_none(),
                          "limit is a percentage: `of` must say of how many bytes");
        const std::int64_t whole = of.is_none() ? 1 : integer_argument("of", of);
        TORCH_CHECK_VALUE(whole > 0, "of must be a positive number of bytes, got ", whole);
        return parsed.resolve(whole);
      },
      py::arg("limit"), py::arg("of") = py::none());
  m.def("install_cpu_allocator", &install_cpu_allocator);
  m.def("cpu_allocator_installed", &cpu_allocator_installed);
}

void register_meter(py::module_& m) {
  PyPeakMeter::bind(m, "PeakMeter")
      .def(py::init([](const py::object& device) {
             return std::make_unique<PyPeakMeter>("PeakMeter", device_list(device));
           }),
           py::arg("device") = py::none())
      .def_property_readonly("peak", [](const PyPeakMeter& self) { return self.object().peak(); })
      .def_property_readonly("start", [](const PyPeakMeter& self) { return self.object().start(); })
      .def_property_readonly("left", [](const PyPeakMeter& self) { return self.object().left(); })
      .def_property_readonly("peaks", [](const PyPeakMeter& self) {
        py::dict peaks;
        for (const c10::Device device : self.object().devices()) {
          peaks[to_python(device)] = self.object().peak(device);
        }
        return peaks;
      });
}

void register_budget(py::module_& m) {
  PyBudget::bind(m, "Budget", false)
      .def(py::init([](const py::object& limit, const py::object& device) {
             return std::make_unique<PyBudget>("budget", limit_argument(limit),
                                               resolve_device(device_argument(device)));
           }),
           py::arg("limit"), py::arg("device") = py::none())
      .def_property_readonly("limit", [](const PyBudget& self) { return self.object().limit(); })
      .def_property_readonly("device", [](const PyBudget& self) {
        return to_python(std::get<c10::Device>(self.arguments()));
      });
}

void register_errors(py::module_& m) {
  py::enum_<OomKind>(m, "OomKind")
      .value("none", OomKind::none)
      .value("device_memory", OomKind::device_memory)
      .value("host_memory", OomKind::host_memory)
      .value("library_workspace", OomKind::library_workspace)
      .value("size_limit", OomKind::size_limit);
  py::class_<OomCause>(m, "OomCause")
      .def_readonly("kind", &OomCause::kind)
      .def_readonly("requested", &OomCause::requested)
      .def_readonly("in_use", &OomCause::in_use)
      .def_property_readonly("device",
                             [](const OomCause& self) -> py::object {
                               return self.device ? to_python(*self.device)
                                                  : py::object(py::none());
                             })
      .def("__bool__", [](const OomCause& self) { return static_cast<bool>(self); })
      .def("__repr__", [](const OomCause& self) {
        return std::string("OomCause(") + to_string(self.kind) +
               (self.device ? ", " + self.device->str() : "") +
               (self.requested ? ", requested " + format_bytes(*self.requested) : "") + ")";
      });
  const auto checked = [](const py::object& error) {
    TORCH_CHECK_TYPE(PyExceptionInstance_Check(error.ptr()), "error must be an exception, got ",
                     py::repr(error).cast<std::string>());
    return classify_python(error);
  };
  m.def("classify_error", checked, py::arg("error"));
  m.def(
      "is_out_of_memory",
      [checked](const py::object& error) { return static_cast<bool>(checked(error)); },
      py::arg("error"));
}

}  // namespace

void register_memory(py::module_& m) {
  register_stats(m);
  register_meter(m);
  register_budget(m);
  register_errors(m);
}

}  // namespace brim::python
