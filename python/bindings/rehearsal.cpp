#include <brim/nn/rehearsal.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>

#include "bindings.h"

namespace brim::python {

void register_rehearsal(py::module_& m) {
  using nn::Rehearsal;
  py::class_<Rehearsal>(m, "Rehearsal")
      .def(py::init([](const AllocatorOptions& options, bool grows, const py::object& device,
                       bool is_hidden, const py::object& mode) {
             const c10::DeviceType type =
                 c10::Device(device.attr("type").cast<std::string>()).type();
             const c10::Device seen = is_hidden ? c10::DeviceType::Meta : type;
             return std::make_unique<Rehearsal>(options, grows, type, seen, mode.ptr());
           }),
           py::arg("options"), py::arg("grows"), py::arg("device"), py::arg("is_hidden"),
           py::arg("mode"), py::keep_alive<1, 6>())
      .def("begin", &Rehearsal::begin)
      .def("end", &Rehearsal::end)
      .def("hold", &Rehearsal::hold)
      .def("allocate", &Rehearsal::allocate)
      .def("free", &Rehearsal::free)
      .def("empty_cache", &Rehearsal::empty_cache)
      .def_property_readonly("keeps_while_room", &Rehearsal::keeps_while_room)
      .def_property_readonly("given_up", [](const Rehearsal& self) {
        const nn::Pressure now = self.pressure();
        return std::tuple(now.dropped_bytes + now.foreseen_bytes, now.dropped + now.foreseen,
                          now.blocks);
      });
}

}  // namespace brim::python
