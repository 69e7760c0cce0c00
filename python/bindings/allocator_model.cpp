#include <brim/memory/bytes.h>
#include <brim/need/trace_search.h>
#include <brim/predict/allocator_model.h>
#include <brim/predict/allocator_settings.h>
#include <brim/predict/memory_trace.h>
#include <c10/util/Exception.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "interpreter.h"
#include "record.h"

namespace brim::python {
namespace {

/// Of an option that may be None, for no limit.
std::int64_t limit_of(const std::optional<std::int64_t>& value) {
  return value.value_or(AllocatorOptions::kUnlimited);
}

py::object limit_or_none(std::int64_t value) {
  return value == AllocatorOptions::kUnlimited ? py::object(py::none()) : py::int_(value);
}

/// What was allocated, and the allocation of each event. The first event of an allocation makes it,
/// the second frees it.
py::tuple saved_trace(const MemoryTrace& trace) {
  py::list allocations;
  for (const MemoryTrace::Allocation& each : trace.allocations()) {
    allocations.append(
        py::make_tuple(each.bytes, each.kind, trace.place_text(each.place), each.stream));
  }
  std::vector<std::int64_t> events;
  events.reserve(trace.events().size());
  for (const MemoryTrace::Event& event : trace.events()) {
    events.push_back(event.allocation);
  }
  return py::make_tuple(allocations, events);
}

MemoryTrace loaded_trace(const py::tuple& state) {
  using Allocation = std::tuple<std::int64_t, MemoryKind, std::string, std::int64_t>;
  const auto allocations = state[0].cast<std::vector<Allocation>>();
  MemoryTrace trace;
  std::size_t made = 0;
  for (const std::int64_t id : state[1].cast<std::vector<std::int64_t>>()) {
    if (id < 0) {
      trace.empty_cache();
    } else if (std::cmp_less(id, made)) {
      trace.free(id);
    } else {
      const auto& [bytes, kind, place, stream] = allocations.at(made++);
      trace.allocate(bytes, kind, trace.place(place), stream);
    }
  }
  return trace;
}

void register_options(py::module_& m) {
  using Options = AllocatorOptions;
  record<Options>(
      m, "AllocatorOptions", "", field(nullptr, &Options::kind), field(nullptr, &Options::capacity),
      field(nullptr, &Options::beyond), field("expandable_segments", &Options::expandable_segments),
      field(nullptr, &Options::max_split_size), field(nullptr, &Options::max_non_split_rounding),
      field(nullptr, &Options::large_segment_size),
      field(nullptr, &Options::roundup_power2_divisions))
      .def(py::init([](const std::string& kind, const std::optional<std::int64_t>& capacity) {
             return Options{
                 .kind = word_argument<AllocatorKind>("kind", kind, {"exact", "caching"}),
                 .capacity = limit_of(capacity)};
           }),
           py::arg("kind") = "caching", py::kw_only(), py::arg("capacity") = py::none())
      .def_static(
          "from_settings",
          [](const std::optional<std::string>& text, const std::optional<std::int64_t>& capacity,
             std::int64_t beyond) {
            AllocatorSettings settings =
                parse_allocator_settings(text ? *text : allocator_settings_in_environment());
            settings.options.capacity = limit_of(capacity);
            settings.options.beyond = beyond;
            return py::make_tuple(settings.options, settings.not_modelled);
          },
          py::arg("text") = py::none(), py::kw_only(), py::arg("capacity") = py::none(),
          py::arg("beyond") = 0)
      .def_property_readonly("capacity",
                             [](const Options& self) { return limit_or_none(self.capacity); })
      .def_property_readonly(
          "max_split_size", [](const Options& self) { return limit_or_none(self.max_split_size); });
}

/// For tests alone, which replay what torch did on a GPU.
void register_allocator(py::module_& m) {
  using Use = AllocatorUse;
  py::class_<Use>(m, "AllocatorUse")
      .def_readonly("requested", &Use::requested)
      .def_readonly("allocated", &Use::allocated)
      .def_readonly("reserved", &Use::reserved)
      .def_readonly("inactive_split", &Use::inactive_split);
  using Model = AllocatorModel;
  py::class_<Model>(m, "AllocatorModel")
      .def(py::init<const AllocatorOptions&>(), py::arg("options") = AllocatorOptions{})
      .def("allocate", &Model::allocate, py::arg("size"), py::arg("stream") = 0)
      .def("free", &Model::free, py::arg("allocation"))
      .def("empty_cache", &Model::empty_cache)
      .def("set_segment_addresses", &Model::set_segment_addresses, py::arg("addresses"))
      .def_property_readonly("now", &Model::now, py::return_value_policy::copy)
      .def_property_readonly("peak", &Model::peak, py::return_value_policy::copy)
      .def_property_readonly("retries", &Model::retries);
}

void register_trace(py::module_& m) {
  py::enum_<MemoryKind>(m, "MemoryKind")
      .value("parameter", MemoryKind::parameter)
      .value("gradient", MemoryKind::gradient)
      .value("optimizer_state", MemoryKind::optimizer_state)
      .value("activation", MemoryKind::activation)
      .value("temporary", MemoryKind::temporary)
      .value("input", MemoryKind::input)
      .value("workspace", MemoryKind::workspace)
      .value("other", MemoryKind::other);

  using Trace = MemoryTrace;
  py::class_<Trace>(m, "MemoryTrace")
      .def(py::init<>())
      .def("place", &Trace::place, py::arg("text"))
      .def("allocate", &Trace::allocate, py::arg("size"), py::arg("kind") = MemoryKind::other,
           py::arg("place") = 0, py::arg("stream") = 0)
      .def("free", &Trace::free, py::arg("allocation"))
      .def("empty_cache", &Trace::empty_cache)
      .def("begin_call", &Trace::begin_call)
      .def("scaled",
           [](Trace copy, MemoryKind kind, double factor) {
             copy.scale(kind, factor);
             return copy;
           })
      .def("place_of", [](const Trace& self,
                          std::int64_t id) { return self.place_text(self.allocation(id).place); })
      .def("__len__", &Trace::size)
      .def(py::pickle(&saved_trace, &loaded_trace));
}

void register_search(py::module_& m) {
  const auto sizes = [](const auto& get) {
    return [get](const TraceSearch& self) { return get(self.sizes()); };
  };
  py::class_<TraceSearch, std::shared_ptr<TraceSearch>>(m, "TraceSearch")
      .def(py::init<const AllocatorOptions&, std::int64_t, std::int64_t>())
      .def("record", &TraceSearch::record)
      .def_property_readonly("next", sizes([](const SizeSearch& of) { return of.next(); }))
      .def_property_readonly("finished", sizes([](const SizeSearch& of) { return of.finished(); }))
      .def_property_readonly("best", sizes([](const SizeSearch& of) { return of.best(); }))
      .def_property_readonly("expected", sizes([](const SizeSearch& of) { return of.expected(); }));
}

void register_report(py::module_& m) {
  using Allocation = TracedAllocation;
  record<Allocation>(m, "TracedAllocation", "", field("id", &Allocation::id),
                     field("bytes", &Allocation::bytes), field("kind", &Allocation::kind),
                     field("place", &Allocation::place))
      .def("__repr__", [](const Allocation& self) {
        return "TracedAllocation(" + format_bytes(self.bytes) + ", " + to_string(self.kind) +
               (self.place.empty() ? "" : ", " + self.place) + ")";
      });

  using Report = TraceReport;
  py::class_<Report>(m, "TraceReport")
      .def_readonly("held_before", &Report::held_before)
      .def_readonly("peak", &Report::peak)
      .def_readonly("left", &Report::left)
      .def_readonly("reserved", &Report::reserved)
      .def_property_readonly("held",
                             [](const Report& self) {
                               py::dict held;
                               for (std::size_t i = 0; i < kMemoryKinds; ++i) {
                                 held[py::cast(static_cast<MemoryKind>(i))] = self.held.at(i);
                               }
                               return held;
                             })
      .def_readonly("largest", &Report::largest)
      .def_property_readonly("fits", &Report::fits)
      .def_property_readonly("fragmentation", &Report::fragmentation);

  using Moment = HeldMoment;
  py::class_<Moment>(m, "HeldMoment")
      .def_readonly("event", &Moment::event)
      .def_readonly("held", &Moment::held)
      .def_readonly("reserved", &Moment::reserved)
      .def_readonly("allocation", &Moment::allocation);
  m.def("timeline", &timeline);
  m.def("replay", &replay, py::arg("trace"), py::arg("options") = AllocatorOptions{},
        py::arg("start") = 0, py::arg("largest") = 10);
}

}  // namespace

void register_allocator_model(py::module_& m) {
  register_options(m);
  register_allocator(m);
  register_trace(m);
  register_search(m);
  register_report(m);
}

}  // namespace brim::python
