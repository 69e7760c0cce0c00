#include <brim/adapt/agreement.h>
#include <brim/dist/group_channel.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <string>

#include "bindings.h"

namespace brim::python {
namespace {

/// The C++ object in one of torch.distributed's. By its address: which holder torch keeps it in is
/// torch's business. Null for None.
template <class T>
c10::intrusive_ptr<T> shared(const py::object& object) {
  return object.is_none() ? c10::intrusive_ptr<T>()
                          : c10::intrusive_ptr<T>::unsafe_reclaim_from_nonowning(object.cast<T*>());
}

}  // namespace

void register_dist(py::module_& m) {
  py::class_<GroupChannel, std::shared_ptr<GroupChannel>>(m, "GroupChannel")
      .def(py::init(
               [](const py::object& messages, const py::object& store, const py::object& program) {
                 return std::make_shared<GroupChannel>(shared<c10d::Backend>(messages),
                                                       shared<c10d::Store>(store),
                                                       shared<c10d::ProcessGroup>(program));
               }),
           py::arg("messages"), py::arg("store"), py::arg("program"))
      .def("close", &GroupChannel::close)
      .def_property_readonly("rank", &GroupChannel::rank)
      .def_property_readonly("ranks", &GroupChannel::ranks);
  py::class_<Agreement, std::shared_ptr<Agreement>>(m, "Agreement")
      .def(py::init([](std::shared_ptr<GroupChannel> channel, std::string function, bool per_rank,
                       bool settled, bool inside) {
             const AgreementOptions options{
                 .per_rank = per_rank,
                 .sync = settled ? Sync::settled : Sync::always,
                 .collectives = inside ? Collectives::inside : Collectives::between};
             return std::make_shared<Agreement>(std::move(channel), options, std::move(function));
           }),
           py::arg("channel"), py::arg("function"), py::arg("per_rank"), py::arg("settled"),
           py::arg("inside"))
      .def("refuse_call", &Agreement::refuse_call, py::arg("why"));
}

}  // namespace brim::python
