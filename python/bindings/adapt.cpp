#include <brim/adapt/detail/driver.h>
#include <brim/adapt/options.h>
#include <brim/adapt/size_memory.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>
#include <torch/csrc/utils/pybind.h>

#include <string>

#include "adaptive_config.h"
#include "adaptive_function.h"
#include "bindings.h"
#include "interpreter.h"
#include "python_error.h"
#include "record.h"

namespace brim::python {
namespace {

std::string text_argument(const char* name, const py::object& value) {
  TORCH_CHECK_TYPE(py::isinstance<py::str>(value), name, " must be a string, got ",
                   text_of(py::repr(value)));
  return text_of(value);
}

/// (name, position[, default]); a position of -1 is keyword only.
ArgumentSlot slot_argument(const py::handle& given) {
  const auto slot = given.cast<py::tuple>();
  PyObject* name = slot[0].cast<py::object>().release().ptr();
  PyUnicode_InternInPlace(&name);
  return {.name = py::reinterpret_steal<py::object>(name),
          .position = slot[1].cast<Py_ssize_t>(),
          .default_value = slot.size() > 2 ? py::object(slot[2]) : py::object()};
}

std::vector<ArgumentSlot> slots_argument(const py::handle& given) {
  std::vector<ArgumentSlot> slots;
  for (const py::handle slot : given) {
    slots.push_back(slot_argument(slot));
  }
  return slots;
}

/// Everything that brim/adapt works out about a decoration. What is not given, or None, keeps its
/// default.
std::shared_ptr<AdaptiveConfig> make_config(const py::dict& given) {
  auto config = std::make_shared<AdaptiveConfig>();
  AdaptOptions& options = config->options;
  const auto read = [&](const char* name, const auto& take) {
    if (given.contains(name) && !given[name].is_none()) {
      take(py::object(given[name]));
    }
  };
  const auto read_into = [&](const char* name, auto& target) {
    read(name,
         [&](const py::object& value) { target = value.cast<std::decay_t<decltype(target)>>(); });
  };
  config->kind = word_argument<AdaptKind>("kind", given["kind"].cast<std::string>(), kAdaptKinds);
  config->binding = word_argument<Binding>("binding", given["binding"].cast<std::string>(),
                                           {"instance", "owner", "none"});
  read_into("has_receiver", config->has_receiver);
  read_into("recipe", config->recipe);
  read("strategy", [&](const py::object& value) {
    options.strategy = parse_strategy(text_argument("strategy", value));
  });
  read("objective", [&](const py::object& value) {
    options.objective = word_argument<Objective>("objective", text_argument("objective", value),
                                                 {"memory", "throughput"});
  });
  read_into("lower", options.lower);
  read("device", [&](const py::object& value) { options.device = device_argument(value); });
  read_into("restore_random_state", options.restore_random_state);
  read_into("host_limit", options.host_limit);
  read_into("exact_halving", options.exact_halving);
  read_into("name", options.name);
  read("parameters", [&](const py::object& slots) { config->parameters = slots_argument(slots); });
  read_into("quanta", config->quanta);
  options.quantum = config->quanta.empty() ? 1 : config->quanta.front();
  read_into("groups", config->groups);
  read("infer", [&](const py::object& slot) { config->infer = slot_argument(slot); });
  read("items", [&](const py::object& slot) { config->items = slot_argument(slot); });
  read("cut_dim", [&](const py::object& dim) { config->cut_dim = dim.cast<std::int64_t>(); });
  read_into("foresee", config->foresee);
  read_into("initial", config->initial);
  read_into("dim", config->dim);
  read_into("progress", config->progress);
  read_into("collect", config->collect);
  read_into("memory", config->memory);
  options.memory = config->memory.get();
  read_into("per_call_site", config->per_call_site);
  read("keys", [&](const py::object& slots) { config->key_arguments = slots_argument(slots); });
  read_into("hasher", config->hasher);
  read_into("salt", config->salt);
  read("restore", [&](const py::object& things) {
    config->restore = things;
    options.restore = [](SavedState& /*state*/) {};  // each call has its own; this says that it has
  });
  read("restore_arguments",
       [&](const py::object& slots) { config->restore_arguments = slots_argument(slots); });
  read_into("restores_chunk", config->restores_chunk);
  read_into("argument_names", config->argument_names);
  read_into("ranks", config->ranks);
  read_into("maxima_may_differ", config->maxima_may_differ);
  read_into("maxima_are_lengths", config->maxima_are_lengths);
  read_into("observer", config->observer);
  if (config->observer) {
    options.observer = [config = config.get()](const Attempt& attempt) {
      release(invoke(config->observer, attempt));
    };
  }
  options.collect_garbage = &collect_garbage;
  read_into("log_name", config->log_name);
  return config;
}

}  // namespace

void register_adapt(py::module_& m) {
  record<Attempt>(
      m, "Attempt", R"(One attempt of an adaptive call: its size and how it ended.

`record` returns a list of them, and `observer=` is called with each. Bytes are None where they are
not known.

Example:
    >>> import brim, torch
    >>> @brim.batch(8, device="cpu")
    ... def work(size):
    ...     torch.zeros(size, 1024)
    >>> _, attempts = work.record()
    >>> attempts
    [Attempt(size=8, fitted, peak 32.00 KiB)]
)",
      field(nullptr, &Attempt::values),
      field("outcome", &Attempt::outcome, "Why it failed; `OomKind.none` if it fitted."),
      field("peak", &Attempt::peak, "The most bytes above `held`; of a failure, when it failed."),
      field("requested", &Attempt::requested, "Bytes asked for when it failed."),
      field("held", &Attempt::held, "Bytes in use when it began."),
      field("available", &Attempt::available, "Bytes that it could use."),
      field(nullptr, &Attempt::device),
      field("seconds", &Attempt::seconds, "How long it took; 0 if it was not timed."),
      field(nullptr, &Attempt::rate),
      field("repeats", &Attempt::repeats,
            "Whether it was the same size once more, after the cache had been released."),
      field(nullptr, &Attempt::remembered))
      .def_property_readonly(
          "size", [](const Attempt& self) { return self.values.front(); },
          "The size; of several parameters the first.")
      .def_property_readonly(
          "values", [](const Attempt& self) { return py::tuple(py::cast(self.values)); },
          "The value of each parameter.")
      .def_property_readonly("fitted", &Attempt::fitted, "Whether memory sufficed.")
      .def("__repr__", [](const Attempt& self) {
        return c10::str("Attempt(size=", c10::Join(", ", self.values), ", ", detail::describe(self),
                        ")");
      });
  py::class_<FunctionMemory, std::shared_ptr<FunctionMemory>>(
      m, "SizeMemory", R"(What the calls of one function have learned about sizes.

Adaptive functions have one each; with `persist=` it is also kept in files.

Args:
    capacity: how many kinds of call are remembered.
    directory: where to keep them; None for this process only.

Example:
    >>> import brim
    >>> len(brim.SizeMemory(capacity=16))
    0
)")
      .def(py::init([](const py::object& capacity, std::optional<std::filesystem::path> directory) {
             const std::int64_t kinds = integer_argument("capacity", capacity);
             TORCH_CHECK_VALUE(kinds >= 1, "capacity must be 1 or more, got ", kinds);
             return std::make_shared<FunctionMemory>(static_cast<std::size_t>(kinds),
                                                     std::move(directory));
           }),
           py::arg("capacity") = SizeMemory::kDefaultCapacity, py::arg("directory") = py::none())
      .def("clear", &FunctionMemory::clear, "Forget everything, in files too.")
      .def("__len__", &FunctionMemory::size, "How many kinds of call are known.")
      .def_static("flush", &SizeMemory::flush,
                  "Does nothing: what a call has learned is in its file when the call returns.")
      .def_static("default_directory", &SizeMemory::default_directory,
                  "Where `persist=True` keeps sizes.");
  m.attr("AdaptiveFunction") = adaptive_function_type();
  m.def("make_adaptive", [](const py::object& function, const py::dict& config) {
    return make_adaptive_function(function, make_config(config));
  });
}

}  // namespace brim::python
