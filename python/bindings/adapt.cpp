#include <brim/adapt/options.h>
#include <brim/adapt/size_memory.h>
#include <brim/memory/bytes.h>
#include <c10/util/Exception.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <string>

#include "adaptive_config.h"
#include "adaptive_function.h"
#include "bindings.h"
#include "core_warnings.h"
#include "interpreter.h"

namespace brim::python {
namespace {

Strategy strategy_argument(const std::string& name) {
  try {
    return parse_strategy(name);
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

Objective objective_argument(const std::string& name) {
  TORCH_CHECK_VALUE(name == "memory" || name == "throughput",
                    "objective must be \"memory\" or \"throughput\", got \"", name, "\"");
  return name == "memory" ? Objective::memory : Objective::throughput;
}

AdaptKind kind_argument(const std::string& name) {
  for (const auto& [text, kind] :
       {std::pair{"maximize", AdaptKind::maximize}, std::pair{"batch", AdaptKind::batch},
        std::pair{"range", AdaptKind::range}, std::pair{"chunked", AdaptKind::chunked}}) {
    if (name == text) {
      return kind;
    }
  }
  TORCH_CHECK_VALUE(false, "kind is \"", name, "\", which is not known");
}

Binding binding_argument(const std::string& name) {
  return name == "instance" ? Binding::instance : name == "owner" ? Binding::owner : Binding::none;
}

/// (name, position, default); a position of -1 is keyword only, and the default is
/// `inspect.Parameter.empty` for none.
ArgumentSlot slot_argument(const py::tuple& slot, const py::object& no_default) {
  PyObject* name = slot[0].cast<py::object>().release().ptr();
  PyUnicode_InternInPlace(&name);
  ArgumentSlot result;
  result.name = py::reinterpret_steal<py::object>(name);
  result.position = slot[1].cast<Py_ssize_t>();
  const py::object otherwise = slot[2];
  if (!otherwise.is(no_default)) {
    result.otherwise = otherwise;
  }
  return result;
}

py::object callable_or_null(const py::object& value) {
  return value.is_none() ? py::object() : value;
}

/// Everything that the Python side worked out about a decoration. The keys are those that
/// brim/adapt.py writes.
std::shared_ptr<AdaptiveConfig> make_config(const py::dict& given) {
  auto config = std::make_shared<AdaptiveConfig>();
  const py::object no_default = given["no_default"];
  config->kind = kind_argument(given["kind"].cast<std::string>());
  config->binding = binding_argument(given["binding"].cast<std::string>());
  config->has_receiver = given["has_receiver"].cast<bool>();
  config->recipe = given["recipe"];
  AdaptOptions& options = config->options;
  options.strategy = strategy_argument(given["strategy"].cast<std::string>());
  options.objective = objective_argument(given["objective"].cast<std::string>());
  options.lower = given["lower"].cast<std::int64_t>();
  options.restore_random_state = given["restore_random_state"].cast<bool>();
  options.exact_halving = given["exact_halving"].cast<bool>();
  options.name = given["name"].cast<std::string>();
  if (!given["device"].is_none()) {
    options.device = device_argument(given["device"]);
  }
  for (const py::handle slot : given["parameters"]) {
    config->parameters.push_back(slot_argument(slot.cast<py::tuple>(), no_default));
  }
  config->quanta = given["quanta"].cast<std::vector<std::int64_t>>();
  options.quantum = config->quanta.empty() ? 1 : config->quanta.front();
  config->groups = given["groups"].cast<std::vector<std::vector<std::size_t>>>();
  if (!given["infer"].is_none()) {
    config->infer = slot_argument(given["infer"].cast<py::tuple>(), no_default);
  }
  config->initial = given["initial"].cast<std::int64_t>();
  config->dim = given["dim"].cast<std::int64_t>();
  config->progress = callable_or_null(given["progress"]);
  if (!given["memory"].is_none()) {
    config->memory = given["memory"].cast<std::shared_ptr<SizeMemory>>();
  }
  config->per_call_site = given["per_call_site"].cast<bool>();
  config->key_by_names = !given["keys"].is_none();
  if (config->key_by_names) {
    for (const py::handle slot : given["keys"]) {
      config->key_arguments.push_back(slot_argument(slot.cast<py::tuple>(), no_default));
    }
  }
  // The others ask for their key ahead of the work in any case.
  const bool at_once = config->kind == AdaptKind::maximize || config->kind == AdaptKind::batch;
  config->checks_key = at_once && config->key_by_names && config->memory != nullptr;
  config->hasher = callable_or_null(given["hasher"]);
  config->salt = given["salt"].cast<std::uint64_t>();
  config->observer = callable_or_null(given["observer"]);
  config->logger = callable_or_null(given["logger"]);
  config->log_level = callable_or_null(given["log_level"]);
  config->collect = callable_or_null(given["collect"]);
  return config;
}

std::string describe(const Attempt& attempt) {
  std::string text = "Attempt(size=";
  for (std::size_t i = 0; i < attempt.values.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(attempt.values[i]);
  }
  text += std::string(", ") + (attempt.fitted() ? "fitted" : to_string(attempt.outcome));
  if (attempt.peak) {
    text += ", peak " + format_bytes(*attempt.peak);
  }
  if (attempt.requested) {
    text += ", asked for " + format_bytes(*attempt.requested) + " more";
  }
  return text + ")";
}

}  // namespace

void register_adapt(py::module_& m) {
  py::class_<Attempt>(m, "Attempt")
      .def_property_readonly("size", [](const Attempt& self) { return self.values.front(); })
      .def_property_readonly("values",
                             [](const Attempt& self) { return py::tuple(py::cast(self.values)); })
      .def_property_readonly("fitted", &Attempt::fitted)
      .def_readonly("outcome", &Attempt::outcome)
      .def_readonly("peak", &Attempt::peak)
      .def_readonly("requested", &Attempt::requested)
      .def_readonly("held", &Attempt::held)
      .def_readonly("available", &Attempt::available)
      .def_readonly("seconds", &Attempt::seconds)
      .def_readonly("repeats", &Attempt::repeats)
      .def("__repr__", &describe);
  py::class_<SizeMemory, std::shared_ptr<SizeMemory>>(m, "SizeMemory")
      .def(py::init<std::size_t, std::optional<std::filesystem::path>>(),
           py::arg("capacity") = SizeMemory::kDefaultCapacity, py::arg("directory") = py::none())
      .def("clear", &SizeMemory::clear)
      .def("__len__", &SizeMemory::size)
      .def_static("flush",
                  [] {
                    CoreWarnings warnings;
                    without_gil([] { SizeMemory::flush(); });
                    PyObject* const none = warnings.deliver(py::none().release().ptr());
                    if (none == nullptr) {
                      throw py::error_already_set();
                    }
                    Py_DECREF(none);
                  })
      .def_static("default_directory", &SizeMemory::default_directory);
  m.attr("AdaptiveFunction") = adaptive_function_type();
  m.def("make_adaptive", [](const py::object& function, const py::dict& config) {
    return make_adaptive_function(function, make_config(config));
  });
}

}  // namespace brim::python
