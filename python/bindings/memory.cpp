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
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <vector>

#include "bindings.h"
#include "context_manager.h"
#include "interpreter.h"
#include "leaving_error.h"
#include "python_error.h"
#include "record.h"

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

struct AskedBudget : Budget {
  /// The warning is hidden before the budget opens: nothing of Python runs between that and the
  /// block, so that an interrupt cannot leave it open.
  AskedBudget(const py::object& /*asked*/, const ByteLimit& limit, c10::Device device)
      : Budget((hide_fallback_warning(), limit), device) {}

 private:
  static void hide_fallback_warning() { invoke(provided("hide_fallback_warning")); }
};

/// Keeps the limit as it was asked for, too.
using PyBeyondBudget = ContextManager<BeyondBudget>;
using PyBudget = ContextManager<AskedBudget, py::object, ByteLimit, c10::Device>;

ByteLimit limit_argument(const py::object& limit, const std::string& name = "limit") {
  if (py::isinstance<py::str>(limit)) {
    return ByteLimit::parse(text_of(limit), name);
  }
  const bool integral = PyIndex_Check(limit.ptr()) != 0 && !py::isinstance<py::bool_>(limit);
  TORCH_CHECK_TYPE(
      integral, name,
      " must be a number of bytes (an int) or a string such as \"512MiB\" or \"50%\", got ",
      py::repr(limit).cast<std::string>());
  return ByteLimit::of_bytes(integer_argument(name.c_str(), limit), name);
}

void register_stats(py::module_& m) {
  record<MemoryStats>(
      m, "MemoryStats",
      R"(Memory of one device as this process sees it, in bytes.

`memory_stats` returns it; `print` shows one figure per line.

Example:
    >>> import brim
    >>> stats = brim.memory_stats("cpu")
    >>> 0 < stats.free <= stats.limit
    True
)",
      field("allocated", &MemoryStats::allocated,
            "Held by tensors; on the CPU since the counting allocator was installed."),
      field("peak", &MemoryStats::peak, "The most of that so far, or since `reset_peak`."),
      field("reserved", &MemoryStats::reserved,
            "Taken from the system: torch's cache, on the CPU the resident set."),
      field("limit", &MemoryStats::limit,
            "The least of what the device, the container and open budgets allow."),
      field("free", &MemoryStats::free, "What can still be allocated before a limit is reached."),
      field("reservable", &MemoryStats::reservable,
            "What torch's cache may take: more than `allocated` and `free` under a CUDA budget."),
      field("inactive_split", &MemoryStats::inactive_split,
            "Cached by torch, but stuck beside a live block; 0 on the CPU."),
      field("alloc_retries", &MemoryStats::alloc_retries,
            "How often torch flushed its cache to make room; 0 on the CPU."),
      field("ooms", &MemoryStats::ooms,
            "How often torch's allocator or a budget ran out of memory; 0 on the CPU."))
      .def("__str__", [](const MemoryStats& self) { return to_string(self); })
      .def("__repr__", [](const MemoryStats& s) {
        return "MemoryStats(allocated=" + std::to_string(s.allocated) +
               ", peak=" + std::to_string(s.peak) + ", reserved=" + std::to_string(s.reserved) +
               ", limit=" + std::to_string(s.limit) + ", free=" + std::to_string(s.free) + ")";
      });
  record<Fragmentation>(
      m, "Fragmentation",
      R"(What torch's cache holds without a tensor in it, in bytes.

`fragmentation` returns it. torch keeps no cache on the CPU: there, all but `usable` is 0.

Example:
    >>> import brim
    >>> now = brim.fragmentation("cpu")
    >>> now.cached, now.explains_failure_of(now.usable + 1)
    (0, False)
)",
      field("cached", &Fragmentation::cached, "Reserved, but held by no tensor."),
      field("stuck", &Fragmentation::stuck,
            "The part of it beside a live tensor, which cannot be released."),
      field("share", &Fragmentation::share, "`cached` as a share of what is reserved."),
      field("usable", &Fragmentation::usable,
            "What could be allocated if every free byte were in one piece."))
      .def("explains_failure_of", &Fragmentation::explains_failure_of, py::arg("requested"),
           "Whether a request of so many bytes failed although that much was free in total.")
      .def("__repr__", [](const Fragmentation& self) {
        return "Fragmentation(cached=" + std::to_string(self.cached) +
               ", stuck=" + std::to_string(self.stuck) + ", usable=" + std::to_string(self.usable) +
               ")";
      });
  using Host = HostMemory;
  py::class_<Host>(m, "HostMemory")
      .def_readonly("physical_total", &Host::physical_total)
      .def_readonly("resident", &Host::resident)
      .def_readonly("cgroup_limit", &Host::cgroup_limit)
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
      [](const py::object& limit, const py::object& of, const std::string& name) {
        const ByteLimit parsed = limit_argument(limit, name);
        TORCH_CHECK_VALUE(!parsed.is_percentage() || !of.is_none(), name,
                          " is a percentage: `of` must say of how many bytes");
        const std::int64_t whole = of.is_none() ? 1 : integer_argument("of", of);
        TORCH_CHECK_VALUE(whole > 0, "of must be a positive number of bytes, got ", whole);
        return parsed.resolve(whole);
      },
      py::arg("limit"), py::arg("of") = py::none(), py::arg("name") = "limit");
  m.def("install_cpu_allocator", &install_cpu_allocator);
  m.def("cpu_allocator_installed", &cpu_allocator_installed);
}

void register_meter(py::module_& m) {
  PyPeakMeter::bind(m, "PeakMeter",
                    R"(Measures the most memory that a `with` block holds at once, in bytes.

What was held when the block began does not count. Meters nest, and each sees all threads. On the
CPU the count is exact; see docs/memory.md for what is counted.

Args:
    device: a device, or a list of devices; the current accelerator if None, else the CPU.

Example:
    >>> import brim, torch
    >>> with brim.PeakMeter("cpu") as meter:
    ...     x = torch.zeros(1024)
    ...     y = x.clone()
    ...     del x
    >>> meter.peak, meter.left
    (8192, 4096)
)")
      .def(py::init([](const py::object& device) {
             return std::make_unique<PyPeakMeter>("PeakMeter", device_list(device));
           }),
           py::arg("device") = py::none())
      .def_property_readonly(
          "peak", [](const PyPeakMeter& self) { return self.object().peak(); },
          "The most bytes held at once above `start`; of one device.")
      .def_property_readonly(
          "start", [](const PyPeakMeter& self) { return self.object().start(); },
          "Bytes held when the block began; of one device.")
      .def_property_readonly(
          "left", [](const PyPeakMeter& self) { return self.object().left(); },
          "Bytes held now, or at the end of the block, less `start`: what the work left behind.")
      .def_property_readonly(
          "peaks",
          [](const PyPeakMeter& self) {
            py::dict peaks;
            for (const c10::Device device : self.object().devices()) {
              peaks[to_python(device)] = self.object().peak(device);
            }
            return peaks;
          },
          "`peak` of each device.");
}

void register_budget(py::module_& m) {
  PyBeyondBudget::bind(m, "BeyondBudget", "For the little that must work when memory has run out.")
      .def(py::init([] { return std::make_unique<PyBeyondBudget>("block"); }));
  PyBudget::bind(m, "Budget", "A limit on the memory of a device; see brim.Budget.", false,
                 [](const PyBudget& self, py::handle error) {
                   explain_leaving(error, to_python(std::get<c10::Device>(self.arguments())));
                 })
      .def(py::init([](const py::object& limit, const py::object& device) {
             return std::make_unique<PyBudget>("budget", limit, limit_argument(limit),
                                               resolve_device(device_argument(device)));
           }),
           py::arg("limit"), py::arg("device") = py::none())
      .def_property_readonly(
          "_asked", [](const PyBudget& self) { return std::get<py::object>(self.arguments()); },
          "The limit as it was given.")
      .def_property_readonly("_entered", &PyBudget::entered, "Whether a block has begun.")
      .def_property_readonly(
          "limit", [](const PyBudget& self) { return self.object().limit(); },
          "The limit in bytes, a percentage resolved; once the block has begun.")
      .def_property_readonly(
          "device",
          [](const PyBudget& self) { return to_python(std::get<c10::Device>(self.arguments())); },
          "The device that is limited.");
}

void register_errors(py::module_& m) {
  py::enum_<OomKind>(m, "OomKind", R"(Why a piece of work failed, as far as memory is concerned.

Example:
    >>> import brim
    >>> brim.classify_error(MemoryError()).kind == brim.OomKind.host_memory
    True
)")
      .value("none", OomKind::none, "something else; a smaller size would not help")
      .value("device_memory", OomKind::device_memory, "an accelerator's memory is exhausted")
      .value("host_memory", OomKind::host_memory, "the CPU's, or a budget on it, is exhausted")
      .value("library_workspace", OomKind::library_workspace,
             "cuBLAS, cuDNN and the like found no room for their scratch memory")
      .value("size_limit", OomKind::size_limit, "a kernel's index range was exceeded");
  record<OomCause>(
      m, "OomCause", R"(What an error says about memory.

`classify_error` returns it. False if the error is not about memory.

Example:
    >>> import brim
    >>> cause = brim.classify_error(
    ...     RuntimeError("MPS backend out of memory. Tried to allocate 1.00 GiB")
    ... )
    >>> bool(cause), cause.requested, cause.device
    (True, 1073741824, device(type='mps'))
)",
      field("kind", &OomCause::kind, "An `OomKind`."), field(nullptr, &OomCause::device),
      field("requested", &OomCause::requested, "Bytes asked for; None if it does not say."),
      field("in_use", &OomCause::in_use, "Bytes that tensors held at that moment, or None."))
      .def_property_readonly(
          "device",
          [](const OomCause& self) -> py::object {
            return self.device ? to_python(*self.device) : py::object(py::none());
          },
          "Where memory ran out, or None.")
      .def("__bool__", [](const OomCause& self) { return static_cast<bool>(self); })
      .def("__repr__", [](const OomCause& self) {
        return std::string("OomCause(") + to_string(self.kind) +
               (self.device ? ", " + self.device->str() : "") +
               (self.requested ? ", requested " + format_bytes(*self.requested) : "") + ")";
      });
  m.def("classify_error", [](const py::object& error) {
    TORCH_CHECK_TYPE(PyExceptionInstance_Check(error.ptr()), "error must be an exception, got ",
                     py::repr(error).cast<std::string>());
    return classify_python(error);
  });
}

}  // namespace

void register_memory(py::module_& m) {
  register_stats(m);
  register_meter(m);
  register_budget(m);
  register_errors(m);
}

}  // namespace brim::python
