#include <brim/adapt/agreement.h>
#include <brim/dist/group_channel.h>
#include <c10/util/Exception.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <string>

#include "bindings.h"
#include "interpreter.h"

namespace brim::python {
namespace {

/// The C++ object in one of torch.distributed's. By its address: which holder torch keeps it in is
/// torch's business. Null for None.
template <class T>
c10::intrusive_ptr<T> shared(const py::object& object) {
  return object.is_none() ? c10::intrusive_ptr<T>()
                          : c10::intrusive_ptr<T>::unsafe_reclaim_from_nonowning(object.cast<T*>());
}

/// Whether a word is the second of two that are allowed.
bool second_of(const char* name, const std::string& given, const char* first, const char* second) {
  TORCH_CHECK_VALUE(given == first || given == second, name, " must be '", first, "' or '", second,
                    "', got '", given, "'");
  return given == second;
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
  py::class_<AgreementOptions>(m, "AgreementOptions")
      .def(
          py::init([](bool per_rank, const std::string& sync, const std::string& collectives) {
            const AgreementOptions options{
                .per_rank = per_rank,
                .sync = second_of("sync", sync, "always", "settled") ? Sync::settled : Sync::always,
                .collectives = second_of("collectives", collectives, "between", "inside")
                                   ? Collectives::inside
                                   : Collectives::between};
            options.check();
            return options;
          }),
          py::arg("per_rank"), py::arg("sync"), py::arg("collectives"));
  py::class_<Agreement, std::shared_ptr<Agreement>>(m, "Agreement")
      .def(py::init<std::shared_ptr<GroupChannel>, const AgreementOptions&, std::string>(),
           py::arg("channel"), py::arg("options"), py::arg("function"))
      .def("refuse_call", &Agreement::refuse_call, py::arg("why"))
      .def(
          "vote_with",
          [](Agreement& self, const py::object& vote) {
            self.vote_with([vote](bool done) { return invoke(vote, done).cast<bool>(); });
          },
          py::arg("vote"))
      .def_property(
          "length", [](const Agreement& self) { return self.lengths.own; },
          [](Agreement& self, std::int64_t items) { self.lengths.own = items; })
      .def_property_readonly(
          "same_length",
          [](const Agreement& self) { return self.lengths.shortest == self.lengths.longest; })
      .def_property_readonly("longest", [](const Agreement& self) { return self.lengths.longest; })
      .def_property_readonly("parts", [](const Agreement& self) { return self.lengths.parts; })
      .def("unsettle", [](Agreement& self) { self.count_exchange(false); });
}

}  // namespace brim::python
