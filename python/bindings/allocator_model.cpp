#include <brim/memory/bytes.h>
#include <brim/predict/allocator_model.h>
#include <brim/predict/allocator_settings.h>
#include <brim/predict/memory_trace.h>
#include <brim/predict/scaled_trace.h>
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
#include "pickled.h"

namespace brim::python {
namespace {

AllocatorKind allocator_kind(const std::string& kind) {
  TORCH_CHECK_VALUE(kind == "exact" || kind == "caching",
                    "kind must be \"exact\" or \"caching\", got \"", kind, "\"");
  return kind == "exact" ? AllocatorKind::exact : AllocatorKind::caching;
}

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
  const Options defaults;
  py::class_<Options>(m, "AllocatorOptions")
      .def(py::init([](const std::string& kind, const std::optional<std::int64_t>& capacity,
                       bool expandable_segments, const std::optional<std::int64_t>& max_split_size,
                       std::int64_t max_non_split_rounding, std::int64_t large_segment_size,
                       std::int64_t roundup_power2_divisions) {
             return Options{.kind = allocator_kind(kind),
                            .capacity = limit_of(capacity),
                            .expandable_segments = expandable_segments,
                            .max_split_size = limit_of(max_split_size),
                            .max_non_split_rounding = max_non_split_rounding,
                            .large_segment_size = large_segment_size,
                            .roundup_power2_divisions = roundup_power2_divisions};
           }),
           py::arg("kind") = "caching", py::kw_only(), py::arg("capacity") = py::none(),
           py::arg("expandable_segments") = defaults.expandable_segments,
           py::arg("max_split_size") = py::none(),
           py::arg("max_non_split_rounding") = defaults.max_non_split_rounding,
           py::arg("large_segment_size") = defaults.large_segment_size,
           py::arg("roundup_power2_divisions") = defaults.roundup_power2_divisions)
      .def_static(
          "from_settings",
          [](const std::optional<std::string>& text, const std::optional<std::int64_t>& capacity) {
            AllocatorSettings settings =
                parse_allocator_settings(text ? *text : allocator_settings_in_environment());
            settings.options.capacity = limit_of(capacity);
            return py::make_tuple(settings.options, settings.not_modelled);
          },
          py::arg("text") = py::none(), py::kw_only(), py::arg("capacity") = py::none())
      .def_property_readonly("kind",
                             [](const Options& self) {
                               return self.kind == AllocatorKind::exact ? "exact" : "caching";
                             })
      .def_property_readonly("capacity",
                             [](const Options& self) { return limit_or_none(self.capacity); })
      .def_readonly("expandable_segments", &Options::expandable_segments)
      .def_property_readonly("max_split_size",
                             [](const Options& self) { return limit_or_none(self.max_split_size); })
      .def_readonly("max_non_split_rounding", &Options::max_non_split_rounding)
      .def_readonly("large_segment_size", &Options::large_segment_size)
      .def_readonly("roundup_power2_divisions", &Options::roundup_power2_divisions)
      .def(pickled<Options>(&Options::kind, &Options::capacity, &Options::expandable_segments,
                            &Options::max_split_size, &Options::max_non_split_rounding,
                            &Options::large_segment_size, &Options::roundup_power2_divisions));
}

void register_allocator(py::module_& m) {
  using Use = AllocatorUse;
  py::class_<Use>(m, "AllocatorUse")
      .def_readonly("requested", &Use::requested)
      .def_readonly("allocated", &Use::allocated)
      .def_readonly("reserved", &Use::reserved)
      .def_readonly("inactive_split", &Use::inactive_split)
      .def("__repr__", [](const Use& self) {
        return "AllocatorUse(requested " + format_bytes(self.requested) + ", allocated " +
               format_bytes(self.allocated) + ", reserved " + format_bytes(self.reserved) +
               ", inactive split " + format_bytes(self.inactive_split) + ")";
      });
  py::class_<AllocatorBlock>(m, "AllocatorBlock")
      .def_readonly("address", &AllocatorBlock::address)
      .def_readonly("size", &AllocatorBlock::size)
      .def_readonly("requested", &AllocatorBlock::requested)
      .def_readonly("allocated", &AllocatorBlock::allocated);
  py::class_<AllocatorSegment>(m, "AllocatorSegment")
      .def_readonly("address", &AllocatorSegment::address)
      .def_readonly("size", &AllocatorSegment::size)
      .def_readonly("stream", &AllocatorSegment::stream)
      .def_readonly("small", &AllocatorSegment::small)
      .def_readonly("blocks", &AllocatorSegment::blocks);

  using Model = AllocatorModel;
  py::class_<Model>(m, "AllocatorModel")
      .def(py::init<const AllocatorOptions&>(), py::arg("options") = AllocatorOptions{})
      .def("allocate", &Model::allocate, py::arg("size"), py::arg("stream") = 0)
      .def("free", &Model::free, py::arg("allocation"))
      .def("empty_cache", &Model::empty_cache)
      .def("reset_peak", &Model::reset_peak)
      .def("set_segment_addresses", &Model::set_segment_addresses, py::arg("addresses"))
      .def(
          "block_size",
          [](const Model& model, std::int64_t allocation) { return model.block(allocation).size; },
          py::arg("allocation"))
      .def_property_readonly("options", &Model::options)
      .def_property_readonly("now", [](const Model& self) { return self.now(); })
      .def_property_readonly("peak", [](const Model& self) { return self.peak(); })
      .def_property_readonly("retries", &Model::retries)
      .def_property_readonly("segments", &Model::segments);
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
      .def("set_kind", &Trace::set_kind, py::arg("allocation"), py::arg("kind"))
      .def("set_place", &Trace::set_place, py::arg("allocation"), py::arg("place"))
      .def(
          "bytes", [](const Trace& self, std::int64_t id) { return self.allocation(id).bytes; },
          py::arg("allocation"))
      .def(
          "kind", [](const Trace& self, std::int64_t id) { return self.allocation(id).kind; },
          py::arg("allocation"))
      .def(
          "is_freed", [](const Trace& self, std::int64_t id) { return self.allocation(id).freed; },
          py::arg("allocation"))
      .def("place_of", [](const Trace& self,
                          std::int64_t id) { return self.place_text(self.allocation(id).place); })
      .def("__len__", &Trace::size)
      .def(py::pickle(&saved_trace, &loaded_trace));
}

void register_report(py::module_& m) {
  using Allocation = TracedAllocation;
  py::class_<Allocation>(m, "TracedAllocation")
      .def_readonly("id", &Allocation::id)
      .def_readonly("bytes", &Allocation::bytes)
      .def_readonly("kind", &Allocation::kind)
      .def_readonly("place", &Allocation::place)
      .def(pickled<Allocation>(&Allocation::id, &Allocation::bytes, &Allocation::kind,
                               &Allocation::place))
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
      .def_readonly("at_peak", &Report::at_peak)
      .def_readonly("peak_event", &Report::peak_event)
      .def_property_readonly("held",
                             [](const Report& self) {
                               py::dict held;
                               for (std::size_t i = 0; i < kMemoryKinds; ++i) {
                                 held[py::cast(static_cast<MemoryKind>(i))] = self.held.at(i);
                               }
                               return held;
                             })
      .def_readonly("largest", &Report::largest)
      .def_readonly("retries", &Report::retries)
      .def_readonly("failed_event", &Report::failed_event)
      .def_readonly("failed", &Report::failed)
      .def_property_readonly("fits", &Report::fits)
      .def_property_readonly("fragmentation", &Report::fragmentation)
      .def("__repr__", [](const Report& self) {
        return "TraceReport(peak " + format_bytes(self.peak) + ", reserved " +
               format_bytes(self.reserved) + (self.fits() ? ")" : ", does not fit)");
      });

  using Moment = HeldMoment;
  py::class_<Moment>(m, "HeldMoment")
      .def_readonly("event", &Moment::event)
      .def_readonly("held", &Moment::held)
      .def_readonly("reserved", &Moment::reserved)
      .def_readonly("allocation", &Moment::allocation);
  m.def("timeline", &timeline, py::arg("trace"), py::arg("options") = AllocatorOptions{},
        py::arg("start") = 0, py::arg("points") = 1000);
  using Sized = std::tuple<const MemoryTrace&, std::int64_t, std::int64_t>;  // trace, size, start
  m.def(
      "largest_scaled",
      [](const Sized& trace, const Sized& other, const AllocatorOptions& options, std::int64_t low,
         std::int64_t high) {
        const auto sized = [](const Sized& it) {
          return SizedTrace{std::get<0>(it), std::get<1>(it), std::get<2>(it)};
        };
        return largest_scaled(sized(trace), sized(other), options, low, high);
      },
      py::arg("trace"), py::arg("other"), py::arg("options"), py::arg("low"), py::arg("high"));
  m.def(
      "replay",
      [](const MemoryTrace& trace, const AllocatorOptions& options, std::int64_t start,
         std::int64_t largest) { return replay(trace, options, start, largest); },
      py::arg("trace"), py::arg("options") = AllocatorOptions{}, py::arg("start") = 0,
      py::arg("largest") = 10);
}

}  // namespace

void register_allocator_model(py::module_& m) {
  register_options(m);
  register_allocator(m);
  register_trace(m);
  register_report(m);
}

}  // namespace brim::python
